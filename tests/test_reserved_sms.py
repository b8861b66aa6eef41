"""Who writes torch's settings for reserved SMs, and which libraries are trusted to obey them."""

from __future__ import annotations

import json
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from tpkernels import reserved_sms
from tpkernels.buckets.build import problem_with_extension
from tpkernels.comm import carveout
from tpkernels.comm.carveout import reservation_of
from tpkernels.dispatch import backends, primitives, products
from tpkernels.reserved_sms import MODEL, ReservedSms, keep, measured, way_beside_collectives

sms, set_sms = torch._C._get_sm_carveout_experimental, torch._C._set_sm_carveout_experimental
CUBLAS, LT = torch._C._BlasBackend.Cublas, torch._C._BlasBackend.Cublaslt
Reservation = reserved_sms.Reservation
ONE, OTHER = Reservation(16, 66), Reservation(32, 66)


@pytest.fixture(params=["python", "extension"])
def settings(request):
    before = sms()
    if request.param == "extension":
        assert problem_with_extension() is None
    yield reserved_sms._IN_EXTENSION if request.param == "extension" else ReservedSms()
    set_sms(before)


@pytest.mark.parametrize("users", [None, 0, 8])
def test_what_the_user_has_set_stays_and_comes_back(settings, users):
    set_sms(users)
    settings.begin(ONE)
    settings.begin(OTHER)
    settings.end(ONE)  # not the last one first
    assert sms() == (users or 0) + 32
    settings.end(OTHER)
    assert sms() == users


def test_all_together_leave_products_half_of_the_gpu(settings):
    set_sms(8)
    settings.begin(OTHER)
    settings.begin(OTHER)
    assert sms() == 66
    settings.end(OTHER)
    assert sms() == 40
    settings.end(OTHER)
    assert sms() == 8


def test_what_the_user_sets_meanwhile_is_kept(settings):
    set_sms(None)
    settings.begin(ONE)
    set_sms(4)
    settings.end(ONE)
    assert sms() == 4


def test_a_pause_leaves_what_the_user_has_set_and_loses_nothing(settings):
    set_sms(8)
    settings.begin(ONE)
    before = settings.begun()
    settings.pause(True)
    assert (sms(), settings.begun() - before) == (8, 0)
    settings.begin(OTHER)
    assert (sms(), settings.begun() - before) == (8, 1)
    settings.end(ONE)
    settings.pause(False)
    assert sms() == 8 + 32
    settings.end(OTHER)
    assert sms() == 8


@pytest.fixture
def torchs_library(monkeypatch):
    """torch's preferred library, as with CUDA."""
    kept = SimpleNamespace(library=CUBLAS)
    monkeypatch.setattr(torch._C, "_get_blas_preferred_backend", lambda: kept.library)
    monkeypatch.setattr(torch._C, "_set_blas_preferred_backend", lambda one: setattr(kept, "library", one))
    yield kept
    set_sms(None)


def test_cublaslt_is_preferred_while_something_that_asks_for_it_is_reserved(torchs_library):
    settings, asks = ReservedSms(), Reservation(16, 66, prefers_lt=True)
    settings.begin(ONE)
    assert torchs_library.library == CUBLAS
    settings.begin(asks)
    settings.begin(asks)
    settings.end(ONE)
    settings.end(asks)
    assert torchs_library.library == LT
    settings.end(asks)
    assert torchs_library.library == CUBLAS


def test_cublaslt_is_not_preferred_during_a_pause(torchs_library):
    settings, asks = ReservedSms(), Reservation(16, 66, prefers_lt=True)
    settings.begin(asks)
    settings.pause(True)
    assert torchs_library.library == CUBLAS
    settings.pause(False)
    assert torchs_library.library == LT
    settings.end(asks)
    assert torchs_library.library == CUBLAS


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_limits_of_half_sums_are_not_lost_in_another_library(kind, torchs_library):
    name, settings = f"allow_{kind}_reduced_precision_reduction", ReservedSms()
    asks = Reservation(16, 66, prefers_lt=True)
    setattr(torch.backends.cuda.matmul, name, False)
    try:
        settings.begin(asks)
        assert torchs_library.library == CUBLAS
        settings.end(asks)
    finally:
        setattr(torch.backends.cuda.matmul, name, True)


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_library_that_the_user_prefers_stays(torchs_library, when):
    settings, asks = ReservedSms(), Reservation(16, 66, prefers_lt=True)
    users = LT if when == "before" else torch._C._BlasBackend.Ck
    torchs_library.library = users if when == "before" else CUBLAS
    settings.begin(asks)
    torchs_library.library = users
    settings.end(asks)
    assert torchs_library.library == users


def test_a_torch_without_cuda_has_no_library_to_prefer(settings):
    asks = Reservation(16, 66, prefers_lt=True)
    settings.begin(asks)
    assert torch._C._get_blas_preferred_backend() == CUBLAS
    settings.end(asks)
    assert torch._C._get_blas_preferred_backend() == CUBLAS


@pytest.mark.parametrize(
    ("obeys", "way"),
    [
        ({}, "cublaslt"),
        ({"cublas": True}, "as usual"),
        ({"cublaslt": False}, "ours"),
        ({"cublas": False, "cublaslt": True}, "cublaslt"),
    ],
)
def test_products_leave_sms_by_what_was_measured_or_else_the_model(obeys, way, tmp_path, monkeypatch):
    monkeypatch.setenv("TPKERNELS_CACHE_DIR", str(tmp_path))
    measured.cache_clear()
    path = keep("NVIDIA H100 80GB HBM3", obeys)
    assert path.is_relative_to(tmp_path)
    assert json.loads(path.read_text()) == obeys
    assert way_beside_collectives("NVIDIA H100 80GB HBM3") == way
    assert way_beside_collectives("another") == "cublaslt"
    measured.cache_clear()


@pytest.mark.parametrize("text", ["", "[]", '{"cublas": "yes"}', "\ud800"])
def test_answers_that_cannot_be_read_leave_the_model(text, tmp_path, monkeypatch):
    monkeypatch.setenv("TPKERNELS_CACHE_DIR", str(tmp_path))
    keep("gpu", {"cublas": True}).write_text(text, errors="surrogatepass")
    measured.cache_clear()
    assert {**MODEL, **measured("gpu")} == MODEL
    measured.cache_clear()


def test_answers_that_others_can_write_are_refused_with_a_sentence(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("TPKERNELS_CACHE_DIR", str(tmp_path))
    keep("gpu", {"cublas": True}).chmod(0o666)
    assert measured("gpu") == {}
    assert "can be written by other users" in caplog.text
    measured.cache_clear()


@pytest.mark.parametrize(
    ("way", "reserved", "resolved"),
    [("ours", 16, "invariant"), ("ours", None, "fastest"), ("cublaslt", 16, "fastest")],
)
def test_our_kernels_compute_where_no_library_leaves_reserved_sms(way, reserved, resolved, monkeypatch):
    device = torch.device("cuda", 0)
    monkeypatch.setattr(backends, "_resolved", lambda *_: "fastest")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "gpu")
    monkeypatch.setattr(backends, "way_beside_collectives", lambda gpu: way)
    backends._takes_reserved_sms.cache_clear()
    set_sms(reserved)
    try:
        assert backends.resolve_backend_now(device) == resolved
        assert backends.resolve_backend(device) == "fastest"  # as ranks agree through, whatever is in flight
    finally:
        set_sms(None)
        backends._takes_reserved_sms.cache_clear()


def test_a_product_asks_who_computes_beside_what_is_in_flight(monkeypatch):
    x = torch.ones(2, 2)
    monkeypatch.setattr(backends, "resolve_backend_now", lambda device: "invariant")
    assert primitives._way_of(products.dgrad, (x, x)) == products.dgrad.ours().run


@pytest.mark.parametrize(("way", "prefers_lt"), [("as usual", False), ("cublaslt", True), ("ours", False)])
def test_a_group_asks_for_cublaslt_where_that_is_enough(way, prefers_lt, monkeypatch):
    gpu = SimpleNamespace(name="gpu", multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    config = SimpleNamespace(max_ctas=24)
    group = SimpleNamespace(_get_backend=lambda _: SimpleNamespace(options=SimpleNamespace(config=config)))
    with patch.object(carveout, "way_beside_collectives", lambda name: way):
        found = reservation_of(group, torch.device("cuda", 0))
    assert found == Reservation(24, 66, prefers_lt)

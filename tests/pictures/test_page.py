"""Pages: escaped, and standing by themselves."""

import re

from tpkernels.pictures.figure import facts, page, paragraph, table, verbatim


def test_page_escapes_all_that_it_is_told():
    told = "<b> & \x00"
    sections = [("", facts([(told, told)])), (told, table([told, told], [[told, told]]))]
    html = page(told, [*sections, ("last", paragraph(told) + verbatim(told))])
    assert html.count("&lt;b&gt; &amp; \ufffd") == 11
    assert "<b>" not in html
    assert "\x00" not in html


def test_page_loads_nothing():
    html = page("title", [("heading", paragraph("text"))])
    assert not re.search(r"src=|href=|@import|url\(", html)
    assert "<h2>heading</h2>" in html
    assert "<h2></h2>" not in page("title", [("", "<p></p>")])

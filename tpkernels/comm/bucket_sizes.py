"""How large buckets are by default. Loads no torch."""

DEFAULT_BUCKET_BYTES = 25 * 2**20
FIRST_BUCKET_BYTES = 2**20  # small, so that communication starts early
ALIGNMENT = 64  # elements: whole cache lines and 16-byte vectors in every dtype

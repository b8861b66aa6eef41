"""The clock against published timings, and what it says of what is shipped."""

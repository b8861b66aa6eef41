"""Other people's names and formats, over ours."""

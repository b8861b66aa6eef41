"""python -m bench.clock: the clock against published timings, in Markdown."""

from bench.clock.validation import report

if __name__ == "__main__":
    print(*report(), sep="\n")

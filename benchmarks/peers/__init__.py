"""What `benchmarks/speed.py` is made of: problems, tools, clocks, suites and the page."""

"""llmc and the engines people use today, side by side in one run: `python -m bench.peers --help`.

model.py       what a model of a shape computes and moves
plan.py        order of the measurements
engines/       one file per engine: how to install, convert, start and serve; its precisions
workers/       one script per engine, run by the Python of its environment, JSON lines on stdin and stdout
process.py     workers and servers as processes: asked, stopped while others are measured, ended
runner.py      takes the measurements, each between two probes of the machine's limit
store.py       the results file, written after every measurement, so that a run can go on later
report.py      medians, ranges, fractions; Markdown tables and JSON
roofline.py    the plot
"""

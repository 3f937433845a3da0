"""What a GPU does: `python -m benchmarks.gpu`; README.md of benchmarks/ tells how to take it to one."""

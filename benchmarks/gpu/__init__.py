"""Measurements on a GPU: `python -m benchmarks.gpu`; README.md of benchmarks/ explains how to run the measurements."""

"""The Python API: functions of the commands' names and options, their results, and an export as a model."""

"""The commands of `extremis`: parse, call, report. What is heavy is imported when a command is called."""

"""The commands of `extremis`, one per file: parse, call, report. Heavy modules are imported when a command runs."""

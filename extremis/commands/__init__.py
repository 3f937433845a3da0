"""The commands of `extremis`, one per file: parse, call, report. Heavy modules are imported at the call."""

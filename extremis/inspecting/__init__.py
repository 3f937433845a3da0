"""What is in storage, in words."""

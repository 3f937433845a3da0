"""One TOML a method; `extremis recipes` lists them."""

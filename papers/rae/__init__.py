"""RAE-XMC: a method from outside, which its recipe names."""

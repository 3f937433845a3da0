"""Dumps from which tables are built during training, and decisions about which table an epoch uses."""

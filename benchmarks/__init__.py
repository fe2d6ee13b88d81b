"""Measurements beside peers and floors. Each prints its workload and hardware, a table, and one JSON line."""

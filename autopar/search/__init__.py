"""The search: from a workload and a cluster to the fastest plan that fits."""

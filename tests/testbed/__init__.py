"""Two real Slurm clusters, a public ingress, a plain host and an operator in namespaces of this machine."""

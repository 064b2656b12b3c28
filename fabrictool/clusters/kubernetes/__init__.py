"""A namespace of a Kubernetes cluster: units as its objects, reached by ``kubectl`` alone."""

"""The only place of the mesh that opens sockets."""

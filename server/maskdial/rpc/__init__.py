"""The open inference protocol over gRPC, on a port of its own: `maskdial[grpc]`."""

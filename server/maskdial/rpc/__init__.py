"""The open inference protocol over gRPC, on a port of its own; it needs the extra ``grpc``."""

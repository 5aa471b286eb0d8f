"""The gRPC contract as generated code: `tools/protos.sh` makes these modules from `protos/`."""

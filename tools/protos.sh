#!/usr/bin/env bash
# Generates interpose/v1/*_pb2.py, *_pb2.pyi and *_pb2_grpc.py from protos/ into DIRECTORY (default: the repository).
#
# The generator is old on purpose: code from protobuf 4.25 runs on every later runtime, so a notebook may keep the
# protobuf it has. The generator lives in an environment of its own, as it would hold back everybody else's protobuf.
#
#   PYTHON    the interpreter that makes the environment: 3.10 to 3.12 (default: python3)
#   PIP_ARGS  further arguments for pip
set -eu
cd "$(dirname "$0")/.."
target=${1:-.}
tools=.venv-protos
generator="grpcio-tools==1.62.3"

if [ "$(cat $tools/.generator 2>/dev/null)" != "$generator" ]; then
    "${PYTHON:-python3}" -m venv $tools
    # The generator asks for pkg_resources, which newer interpreters and setuptools no longer bring.
    # shellcheck disable=SC2086
    $tools/bin/python -m pip install --quiet ${PIP_ARGS:-} "$generator" "setuptools<81"
    echo "$generator" > $tools/.generator
fi

protoc() {
    $tools/bin/python -W ignore -m grpc_tools.protoc -I protos "$@"
}
mkdir -p "$target"
protoc --python_out="$target" --pyi_out="$target" protos/interpose/v1/*.proto
protoc --grpc_python_out="$target" protos/interpose/v1/service.proto protos/interpose/v1/operator.proto

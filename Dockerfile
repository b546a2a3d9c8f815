# The server with its starter models; no torch. BASE can be any image that has Python 3.12 or that can install
# it with apt-get. For GPUs:
#   docker build --build-arg BASE=nvidia/cuda:13.0.2-base-ubuntu24.04 --build-arg EXTRA=cuda .
# All packages are at the versions and have the hashes of deploy/locks/.
ARG BASE=python:3.12-slim

FROM ${BASE} AS base
# NVIDIA's images have no Python.
RUN command -v python3 || { apt-get update && apt-get install -y --no-install-recommends python3 && rm -rf /var/lib/apt/lists/*; }

FROM base AS build
ARG EXTRA=
WORKDIR /src
RUN python3 -m pip --version || { apt-get update && apt-get install -y --no-install-recommends python3-pip python3-venv && rm -rf /var/lib/apt/lists/*; }
RUN python3 -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12) and "deploy/locks/ is for Python 3.12; BASE has " + sys.version.split()[0])'
# It compiles the kernels (docs/kernels.md) when the package is installed; the image itself has no compiler.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
# Without pip: the environment copied below holds only the server and its dependencies.
RUN python3 -m venv --without-pip /opt/maskdial && python3 -m venv --without-pip /opt/build
ENV PIP_NO_CACHE_DIR=1
# Dependencies first, so that a change of our code does not reinstall them.
COPY deploy/locks/ locks/
RUN python3 -m pip --python /opt/maskdial install --require-hashes --only-binary :all: -r locks/server.txt \
 && python3 -m pip --python /opt/build install --require-hashes --only-binary :all: -r locks/build.txt
# Separately, because onnxruntime-gpu must overwrite the files of onnxruntime.
RUN if [ -n "$EXTRA" ]; then python3 -m pip --python /opt/maskdial install --require-hashes --only-binary :all: -r "locks/$EXTRA.txt"; fi
COPY . .
RUN python3 -m pip --python /opt/build wheel --no-deps --no-build-isolation --wheel-dir /wheels . \
 && python3 -m pip --python /opt/maskdial install --no-deps --no-index /wheels/*.whl \
 && find /opt/maskdial -type d \( -name tests -o -path '*/onnx/backend/test' \) -prune -exec rm -rf {} +

FROM base
LABEL org.opencontainers.image.title="maskdial" \
      org.opencontainers.image.description="An inference server for masked and causal language models on ONNX Runtime" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/maskdial /opt/maskdial
# Mount point for your own bundles: -v models:/models, then serve --model NAME=/models/NAME
RUN mkdir /models
# Nothing is written at run time, so the root file system can be read-only. ONNX Runtime's official
# builds send telemetry and store a device id unless disabled. NVIDIA's two variables let its container
# runtime mount the driver; without a GPU they have no effect.
ENV PATH=/opt/maskdial/bin:$PATH \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    ORT_DISABLE_TELEMETRY=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    MASKDIAL_HOST=0.0.0.0 \
    MASKDIAL_PORT=8000
USER 10001:10001
EXPOSE 8000
STOPSIGNAL SIGTERM
# Of the server as it was started: with its flags, with TLS, on its port.
HEALTHCHECK --interval=10s --timeout=10s --start-period=30s CMD ["maskdial", "health", "--pid", "1"]
ENTRYPOINT ["maskdial"]
CMD ["serve"]

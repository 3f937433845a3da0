# Images of Extremis; docs/images.md says what each needs, and what it may write.
#   docker build --target pipelines -t extremis-pipelines .     (Beam workers: no torch)
#   docker build --target trainer   -t extremis-trainer .       (training: no Beam)
#   docker build --target serve     -t extremis-serve .         (an HTTP service of an export: no torch, no Beam)
# With --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu the trainer gets torch without CUDA.
# What is installed has the versions and SHA-256 of images/locked.txt; images/release.sh states the base by its digest.
ARG PYTHON=3.11
ARG BASE=python:${PYTHON}-slim

FROM ${BASE} AS base
ARG BASE
LABEL org.opencontainers.image.base.name="${BASE}"
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
# The first process of a container gets no SIGTERM that it has no handler for: tini passes it on, and buries orphans.
RUN apt-get update -qq && apt-get install -qq -y --no-install-recommends tini && rm -rf /var/lib/apt/lists/*
# Group 0 may write where the user may: some clusters give a container a user of their own, in that group.
RUN useradd --create-home --uid 1000 extremis && chgrp 0 /home/extremis && chmod g=u /home/extremis
# What is compiled at the first use lies in /tmp, so that any user can run the image, on a read-only root too.
ENV HOME=/home/extremis NUMBA_CACHE_DIR=/tmp/numba TRITON_CACHE_DIR=/tmp/triton EXTREMIS_ALIVE=/tmp
WORKDIR /opt/extremis
HEALTHCHECK --start-period=60s CMD ["python", "/opt/extremis/health.py"]

FROM base AS wheel
COPY images/locked.txt images/requirements.py ./
RUN python requirements.py build >build.txt && pip install --require-hashes -r build.txt
COPY setup.py setup.cfg pyproject.toml README.md LICENSE ./
COPY schemas schemas
COPY search search
COPY pipelines pipelines
COPY trainer trainer
COPY scoring scoring
COPY extremis extremis
COPY recipes recipes
COPY examples/tate examples/tate
ARG REVISION=unknown
RUN EXTREMIS_COMMIT="${REVISION}" pip wheel -q --no-deps --no-build-isolation -w /wheels .

# A worker image for Beam's portable runners (Flink, Spark, Dataflow); docs/runners.md says how each is told of it.
# `extremis embed` loads a model: build its workers with --build-arg EXTRAS=pipelines,trainer,s3
FROM base AS pipelines
ARG EXTRAS=pipelines,s3
# Requirements have a layer of their own: code changes more often.
COPY images/locked.txt images/requirements.py ./
RUN python requirements.py "${EXTRAS}" >requirements.txt && \
    pip install --require-hashes --only-binary :all: -r requirements.txt
COPY images/health.py images/sbom.py ./
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install --no-deps /wheels/*.whl && pip check && python sbom.py pipelines >sbom.cdx.json
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="extremis-pipelines" org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.description="Workers of Extremis' pipelines for Beam's portable runners" \
      org.opencontainers.image.version="${VERSION}" org.opencontainers.image.revision="${REVISION}"
USER 1000
WORKDIR /home/extremis
# The boot program that a runner starts a worker with.
ENTRYPOINT ["tini", "--", "extremis-worker"]

FROM base AS trainer
ARG EXTRAS=trainer,s3
ARG TORCH_INDEX=
COPY images/locked.txt images/requirements.py ./
# torch of another index has other digests, and needs none of CUDA's packages.
RUN python requirements.py "${EXTRAS}" >requirements.txt && \
    if [ -n "${TORCH_INDEX}" ]; then \
      pip install --no-deps --index-url "${TORCH_INDEX}" "$(grep -o '^torch==[^ ;]*' requirements.txt)" && \
      python requirements.py "${EXTRAS}" --without 'torch|triton|cuda-.*|nvidia-.*' >requirements.txt; fi && \
    pip install --require-hashes --only-binary :all: -r requirements.txt
# Triton, which comes with torch for CUDA, compiles a launcher for each kernel at its first use.
RUN if pip show -q triton 2>/dev/null; then apt-get update -qq && \
      apt-get install -qq -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; fi
COPY images/health.py images/sbom.py ./
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install --no-deps /wheels/*.whl && pip check && python sbom.py trainer >sbom.cdx.json
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="extremis-trainer" org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.description="Training and serving of Extremis" \
      org.opencontainers.image.version="${VERSION}" org.opencontainers.image.revision="${REVISION}"
USER 1000
WORKDIR /home/extremis
ENTRYPOINT ["tini", "--", "extremis"]
CMD ["--help"]

FROM base AS serve
ARG EXTRAS=http,s3
COPY images/locked.txt images/requirements.py ./
RUN python requirements.py "${EXTRAS}" >requirements.txt && \
    pip install --require-hashes --only-binary :all: -r requirements.txt
COPY images/health.py images/sbom.py ./
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install --no-deps /wheels/*.whl && pip check && python sbom.py serve >sbom.cdx.json
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="extremis-serve" org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.description="An HTTP service of an export of Extremis" \
      org.opencontainers.image.version="${VERSION}" org.opencontainers.image.revision="${REVISION}"
USER 1000
WORKDIR /home/extremis
EXPOSE 8000
ENTRYPOINT ["tini", "--", "extremis", "serve", "--host", "0.0.0.0"]
CMD ["--help"]

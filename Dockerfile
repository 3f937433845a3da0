# Two images from one base. Build one of them:
#   docker build --target pipelines -t extremis-pipelines .     (Beam workers: no torch)
#   docker build --target trainer   -t extremis-trainer .       (training: no Beam)
ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS base
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN useradd --create-home --uid 1000 extremis
WORKDIR /opt/extremis
COPY setup.cfg pyproject.toml constraints.txt README.md LICENSE ./
COPY schemas schemas
COPY search search
COPY pipelines pipelines
COPY trainer trainer
COPY extremis extremis
COPY recipes recipes
COPY examples/tate examples/tate

# A worker image for Beam's portable runners (Flink, Spark, Dataflow); docs/runners.md says how each is told of it.
# `extremis embed` loads a model: build its workers with --build-arg EXTRAS=pipelines,trainer,s3
FROM base AS pipelines
ARG EXTRAS=pipelines,s3
RUN pip install -c constraints.txt ".[${EXTRAS}]"
USER extremis
# The boot program that a runner starts a worker with.
ENTRYPOINT ["extremis-worker"]

FROM base AS trainer
RUN pip install -c constraints.txt '.[trainer,s3]'
USER extremis
ENTRYPOINT ["extremis"]
CMD ["--help"]

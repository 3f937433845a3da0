# Two images from one base. Build one of them:
#   docker build --target pipelines -t extremis-pipelines .     (Beam workers: no torch)
#   docker build --target trainer   -t extremis-trainer .       (training: no Beam)
ARG PYTHON=3.11
ARG BEAM=2.77.0

# The boot program that Beam's portable runners start a worker with, from Beam's image of the same version.
FROM apache/beam_python${PYTHON}_sdk:${BEAM} AS beam

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
COPY --from=beam /opt/apache/beam /opt/apache/beam
# Without it boot makes a virtual environment below /opt at each start, which only root could.
ENV RUN_PYTHON_SDK_IN_DEFAULT_ENVIRONMENT=1
USER extremis
ENTRYPOINT ["/opt/apache/beam/boot"]

FROM base AS trainer
RUN pip install -c constraints.txt '.[trainer,s3]'
USER extremis
ENTRYPOINT ["extremis"]
CMD ["--help"]

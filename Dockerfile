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
COPY pipelines pipelines
COPY trainer trainer
COPY extremis extremis
COPY recipes recipes

# A worker image for Beam's portable runners (Flink, Spark, Dataflow): pass it as --sdk_container_image
# with --environment_type=DOCKER. The SDK's own boot program comes from Beam's image of the same version.
FROM base AS pipelines
RUN pip install -c constraints.txt '.[pipelines,s3]'
COPY --from=apache/beam_python3.11_sdk:2.77.0 /opt/apache/beam /opt/apache/beam
USER extremis
ENTRYPOINT ["/opt/apache/beam/boot"]

FROM base AS trainer
RUN pip install -c constraints.txt '.[trainer,s3]'
USER extremis
ENTRYPOINT ["extremis"]
CMD ["--help"]

#!/bin/sh
# Build the images of this commit on a base that is named by its digest, and push them: images/release.sh REGISTRY
# Needs Docker with buildx. PYTHON=3.12 takes another Python; BASE, another base, such as a mirror's.
set -eu
cd "$(dirname "$0")/.."
registry=${1:?"which registry? images/release.sh REGISTRY"}
base=${BASE:-python:${PYTHON:-3.11}-slim}
if [ -n "$(git status --porcelain)" ]; then
  echo "error: there are changes that no commit has, so no image could say what it is made of. Commit them." >&2
  exit 2
fi
case $base in *@sha256:*) ;; *) base=$base@$(docker buildx imagetools inspect "$base" --format '{{.Manifest.Digest}}') ;; esac
version=$(sed -n 's/^VERSION = "\([^"]*\)".*/\1/p' schemas/__init__.py)
for target in pipelines trainer serve; do
  docker buildx build --push --sbom=true --provenance=mode=max --target "$target" --tag "$registry/extremis-$target:$version" \
    --build-arg BASE="$base" --build-arg VERSION="$version" --build-arg REVISION="$(git rev-parse HEAD)" .
done

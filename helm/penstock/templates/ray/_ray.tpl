{{/* Parts of the RayCluster's pods, shared by the head and the worker groups. */}}

{{- define "penstock.ray.startParams" -}}
{{- /* Every port that `ray start` would otherwise choose: the NetworkPolicies name them. Every value is a string. */ -}}
num-cpus: {{ eq .role "head" | ternary 0 .of.cpus | toString | quote }}
num-gpus: {{ .of.gpus | default 0 | toString | quote }}
# In single quotes: KubeRay, the autoscaler and the shell each remove one pair. The processes of cpu pods request no CPUs:
# four for each CPU fill a pod, so that the autoscaler adds one; one place more is for preparation, so that runs at the
# bound cannot keep it waiting. Other pods are full by their CPUs and GPUs first. Their places are in proportion to their
# size, because the autoscaler prefers the kind of pod that it uses most completely.
{{- $places := eq .role "cpu" | ternary (add 1 (mul 4 .of.cpus)) (mul 1000 (eq .role "head" | ternary 1 .of.cpus)) }}
resources: {{ printf `'{"penstock-%s": %d}'` .role $places | quote }}
object-store-memory: {{ mul .root.Values.ray.objectStoreMiB 1048576 | toString | quote }}
object-manager-port: "8076"
node-manager-port: "8077"
runtime-env-agent-port: "8078"
dashboard-agent-grpc-port: "8079"
dashboard-agent-listen-port: "52365"
metrics-export-port: "8080"
min-worker-port: "10002"
max-worker-port: "19999"
disable-usage-stats: "true"
{{- if eq .role "head" }}
port: "6379"
include-dashboard: {{ .root.Values.ray.dashboard | toString | quote }}
dashboard-host: {{ .root.Values.ray.dashboard | ternary "0.0.0.0" "127.0.0.1" | quote }}
{{- end }}
{{- end }}

{{- define "penstock.ray.env" -}}
{{ include "penstock.env" .root }}
- name: PENSTOCK_METRICS_PORTS
  value: 9400-9499
- name: PENSTOCK_NODE
  valueFrom:
    fieldRef:
      fieldPath: spec.nodeName
{{- if and .of.gpus (eq (include "penstock.ray.gpuResource" .root) "nvidia.com/gpu") }}
# Whole GPUs of NVIDIA are checked before Ray starts.
- name: PENSTOCK_GPUS
  value: {{ .of.gpus | int | quote }}
{{- end }}
{{- if eq .role "head" }}
- name: PENSTOCK_BOUNDS
  value: /etc/penstock/bounds/bounds.json
- name: PENSTOCK_EXPIRE_ENDED_S
  value: {{ .root.Values.head.expireEndedSeconds | int64 | quote }}
{{- with include "penstock.prices.env" .root | trim }}
{{ . }}
{{- end }}
{{- if include "penstock.redis.caSecret" .root }}
# Ray's own variable for the certificate authority of its Redis connection.
- name: RAY_REDIS_CA_CERT
  value: /etc/penstock/redis-ca/ca.crt
{{- end }}
{{- end }}
{{ include "penstock.storage.env" . }}
{{- /* Server-side apply rejects duplicate names. Priority: the group's variables, then Ray's, then these. */ -}}
{{- $own := dict -}}
{{- range concat .root.Values.ray.env .of.env -}}{{- $_ := set $own .name . -}}{{- end -}}
{{- range $name, $folder := dict "XDG_CACHE_HOME" "cache" "XDG_CONFIG_HOME" "config" "TORCH_EXTENSIONS_DIR" "torch-extensions" "TORCHINDUCTOR_CACHE_DIR" "torchinductor" "TRITON_CACHE_DIR" "triton" "CUDA_CACHE_PATH" "cuda" "NUMBA_CACHE_DIR" "numba" "MPLCONFIGDIR" "matplotlib" "HF_HOME" "huggingface" "VLLM_CACHE_ROOT" "vllm" "VLLM_CONFIG_ROOT" "vllm-config" }}
{{- if not (hasKey $own $name) }}
- name: {{ $name }}
  value: /tmp/{{ $folder }}
{{- end }}
{{- end }}
{{- if eq .role "cpu" }}
{{- include "penstock.hub.env" (dict "root" .root "own" $own) }}
{{- include "penstock.tracking.env" (dict "root" .root "own" $own) }}
{{- end }}
{{- if hasPrefix "verifier" .role }}
{{ include "penstock.rewards.env" . }}
{{- end }}
{{- range $own }}
- {{ toYaml . | nindent 2 | trim }}
{{- end }}
{{- end }}

{{- define "penstock.ray.volumes" -}}
- name: tmp
  emptyDir: {{ include "penstock.emptyDir" .root.Values.ray.tmpSize }}
# The runtime's default of 64 MB is too small for vLLM's and NCCL's segments.
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ .of.shmSize }}
{{ include "penstock.storage.volume" . }}
{{ include "penstock.redis.volumes" .root }}
{{- if eq .role "verifier" }}
{{- include "penstock.functions.volumes" .root }}
{{- end }}
{{- if eq .role "head" }}
- name: ray-logs
  emptyDir: {{ include "penstock.emptyDir" .root.Values.ray.tmpSize }}
- name: autoscaler-tmp
  emptyDir:
    sizeLimit: 1Gi
- name: bounds
  configMap:
    name: {{ include "penstock.fullname" .root }}-bounds
{{ include "penstock.tokenVolume" . }}
{{- end }}
{{- if has .role (include "penstock.storage.roles" .root | fromJsonArray) }}
{{- with .root.Values.ray.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}
{{- end }}

{{- define "penstock.ray.mounts" -}}
- name: tmp
  mountPath: /tmp
- name: shm
  mountPath: /dev/shm
- name: runs
  mountPath: /var/lib/penstock
{{ include "penstock.redis.mounts" .root }}
{{- if eq .role "verifier" }}
{{- include "penstock.functions.mounts" .root }}
{{- end }}
{{- if eq .role "head" }}
# The autoscaler writes its log to Ray's session folder.
- name: ray-logs
  mountPath: /tmp/ray
# The folder, not the file: otherwise a running pod would not see a new version.
- name: bounds
  mountPath: /etc/penstock/bounds
  readOnly: true
{{- end }}
{{- if has .role (include "penstock.storage.roles" .root | fromJsonArray) }}
{{- with .root.Values.ray.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}
{{- end }}

{{- define "penstock.ray.gpuResource" -}}
{{ .Values.ray.gpuResource | default "nvidia.com/gpu" }}
{{- end }}

{{- define "penstock.ray.tolerations" -}}
{{- /* As JSON. The taint names whole GPUs, even on nodes that offer slices of them. */ -}}
{{- $tolerations := concat .root.Values.ray.tolerations .of.tolerations -}}
{{- $resource := include "penstock.ray.gpuResource" .root -}}
{{- if or (gt (int .of.gpus) 0) (include "penstock.ray.onGpuNodes" .) -}}
{{- range list $resource (printf "%s/gpu" (dir $resource)) | uniq -}}
{{- $tolerations = append $tolerations (dict "key" . "operator" "Exists" "effect" "NoSchedule") -}}
{{- end -}}
{{- end -}}
{{ toJson $tolerations }}
{{- end }}

{{- define "penstock.ray.nodeSelector" -}}
{{- /* (dict "root" $ "of" .Values.rollout): as JSON; the group's own values take precedence. */ -}}
{{ merge (deepCopy .of.nodeSelector) .root.Values.ray.nodeSelector | toJson }}
{{- end }}

{{- define "penstock.ray.onGpuNodes" -}}
{{- /* "true" if a pod without GPUs may be bound to a GPU node and so needs its toleration: by the shared volume, by a
       node label of such nodes, or by a node selector that a group with GPUs has too. */ -}}
{{- if include "penstock.anyGpus" .root -}}
{{- $found := include "penstock.storage.shared" . | list | compact -}}
{{- $selector := include "penstock.ray.nodeSelector" . | fromJson -}}
{{- $vendor := printf "%s/" (include "penstock.ray.gpuResource" .root | dir) -}}
{{- range $label, $_ := $selector -}}
{{- if or (has $label $.root.Values.ray.gpuNodeLabels) (hasPrefix $vendor $label) -}}{{- $found = append $found $label -}}{{- end -}}
{{- end -}}
{{- range include "penstock.workers" .root | fromJsonArray -}}
{{- $theirs := include "penstock.ray.nodeSelector" (dict "root" $.root "of" .of) | fromJson -}}
{{- if and .of.gpus $theirs (deepEqual $selector (merge (deepCopy $theirs) $selector)) -}}{{- $found = append $found "selector" -}}{{- end -}}
{{- end -}}
{{- with $found -}}true{{- end -}}
{{- end -}}
{{- end }}

{{- define "penstock.ray.elastic" -}}
{{- /* "true" if Kueue admits each further pod by itself. */ -}}
{{- if eq (get (.Values.ray.annotations | default dict) "kueue.x-k8s.io/elastic-job" | default "") "true" -}}true{{- end -}}
{{- end }}

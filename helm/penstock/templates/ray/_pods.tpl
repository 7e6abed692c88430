{{/* Shared by all pods: security, environment, resources, probes. */}}

{{- define "penstock.podSecurity" -}}
{{- /* (dict "uid" 10001) */ -}}
runAsNonRoot: true
runAsUser: {{ .uid }}
runAsGroup: {{ .uid }}
fsGroup: {{ .uid }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "penstock.containerSecurity" -}}
{{- /* (dict "uid" 10001 "of" .Values.verifierCode). Complete, although the pod sets much of it: KubeRay copies it to its
       own containers. `of`, if given, may name other profiles, and the isolation of programs. */ -}}
{{- $of := .of | default dict -}}
runAsNonRoot: true
runAsUser: {{ .uid }}
runAsGroup: {{ .uid }}
readOnlyRootFilesystem: true
allowPrivilegeEscalation: false
capabilities:
  drop: [ALL]
{{- if eq ($of.isolation | default "") "bubblewrap" }}
procMount: Unmasked
{{- end }}
seccompProfile:
  {{- $of.seccompProfile | default (dict "type" "RuntimeDefault") | toYaml | nindent 2 }}
{{- with $of.appArmorProfile }}
appArmorProfile:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "penstock.resources" -}}
{{- /* (dict "of" .Values.api "more" (dict "nvidia.com/gpu" 1)): requests default to the limits. */ -}}
{{- $limits := merge (dict "cpu" (toString .of.cpus) "memory" .of.memory) (.more | default dict) -}}
{{- $requests := merge (deepCopy (.of.requests | default dict)) $limits -}}
limits:
  {{- toYaml $limits | nindent 2 }}
requests:
  {{- toYaml $requests | nindent 2 }}
{{- end }}

{{- define "penstock.emptyDir" -}}
{{- /* A folder on the node's disk; the size limit may be null. */ -}}
{{ empty . | ternary dict (dict "sizeLimit" .) | toJson }}
{{- end }}

{{- define "penstock.env" -}}
{{- /* For every Penstock process. */ -}}
{{ include "penstock.redis.env" . }}
- name: PENSTOCK_HOST
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
- name: PENSTOCK_LOG_LEVEL
  value: {{ .Values.logLevel }}
# The root file system is read-only: libraries write to a home in /tmp.
- name: HOME
  value: /tmp/home
{{- end }}

{{- define "penstock.scheduling" -}}
{{- /* (dict "of" .Values.api) */ -}}
{{- with .of.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .of.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .of.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .of.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .of.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .of.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- end }}

{{- define "penstock.pullSecrets" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "penstock.probe" -}}
{{- /* (dict "path" "/healthz" "port" "http" "period" 10 "failures" 3) */ -}}
httpGet:
  path: {{ .path }}
  port: {{ .port }}
periodSeconds: {{ .period }}
timeoutSeconds: 5
failureThreshold: {{ .failures }}
{{- end }}

{{- define "penstock.bytes" -}}
{{- /* A memory quantity in bytes; suffixes: Ki, Mi, Gi, Ti, k, M, G, T, or none. */ -}}
{{- $units := dict "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "k" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 "" 1 -}}
{{- $text := toString . -}}
{{- mulf (regexFind "^[0-9.]+" $text | float64) (get $units (regexFind "[A-Za-z]*$" $text)) | floor | int64 -}}
{{- end }}

{{- define "penstock.tokenVolume" -}}
{{- /* A token for the Kubernetes API, for the one container that mounts it; the pod itself mounts none. */ -}}
- name: kubernetes-token
  projected:
    # Readable only by the pod's group.
    defaultMode: 0440
    sources:
      - serviceAccountToken:
          path: token
          expirationSeconds: 3600
      - configMap:
          name: kube-root-ca.crt
          items:
            - key: ca.crt
              path: ca.crt
      - downwardAPI:
          items:
            - path: namespace
              fieldRef:
                fieldPath: metadata.namespace
{{- end }}

{{- define "penstock.tokenMount" -}}
- name: kubernetes-token
  mountPath: /var/run/secrets/kubernetes.io/serviceaccount
  readOnly: true
{{- end }}

{{- define "penstock.prices.env" -}}
{{- /* For the controller and the API. An upgrade that reuses the values of an older release has no prices. */ -}}
{{- with .Values.prices }}
{{- if .currency }}
- name: PENSTOCK_PRICES
  value: {{ dict "currency" .currency "gpu_hour" (.gpuHour | default 0 | float64) "cpu_hour" (.cpuHour | default 0 | float64) | toJson | quote }}
{{- end }}
{{- end }}
{{- end }}

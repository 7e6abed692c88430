{{/* Peers and ports of the NetworkPolicies; each list is rendered as YAML for `from`, `to` or `ports`. */}}

{{- define "penstock.net.pods" -}}
{{- /* (dict "root" $ "components" (list "api" "head")) */ -}}
- podSelector:
    matchLabels:
      {{- include "penstock.selectorLabels" (dict "root" .root) | nindent 6 }}
    matchExpressions:
      - key: app.kubernetes.io/component
        operator: In
        values: {{ toJson .components }}
{{- end }}

{{- define "penstock.net.ports" -}}
{{- /* (dict "ports" (list 53) "protocols" (list "TCP")) */ -}}
{{- $rules := list -}}
{{- range $port := .ports -}}
{{- range $protocol := $.protocols | default (list "TCP") -}}
{{- $rules = append $rules (dict "port" (int $port) "protocol" $protocol) -}}
{{- end -}}
{{- end -}}
{{ toYaml $rules }}
{{- end }}

{{- define "penstock.net.rayPorts" -}}
{{- /* (dict "of" "head"): GCS (the head's alone), object manager, raylet, agents, workers, as given to `ray start`. */ -}}
{{- if eq .of "head" }}
- port: 6379
  protocol: TCP
{{- end }}
- port: 8076
  endPort: 8079
  protocol: TCP
- port: 52365
  protocol: TCP
- port: 10002
  endPort: 19999
  protocol: TCP
{{- end }}

{{- define "penstock.net.fromPrometheus" -}}
- from:
    - namespaceSelector:
        {{- toYaml .Values.networkPolicy.prometheus.namespaceSelector | nindent 8 }}
      podSelector:
        {{- toYaml .Values.networkPolicy.prometheus.podSelector | nindent 8 }}
{{- end }}

{{- define "penstock.net.toDns" -}}
- to:
    {{- toYaml .Values.networkPolicy.dns.peers | nindent 4 }}
  ports:
    {{- include "penstock.net.ports" (dict "ports" .Values.networkPolicy.dns.ports "protocols" (list "UDP" "TCP")) | nindent 4 }}
{{- end }}

{{- define "penstock.net.toRedis" -}}
- to:
    {{- if .Values.redis.external.enabled }}
    {{- toYaml .Values.networkPolicy.externalRedis.peers | nindent 4 }}
    {{- else }}
    {{- include "penstock.net.pods" (dict "root" . "components" (list "redis")) | nindent 4 }}
    {{- end }}
  ports:
    {{- include "penstock.net.ports" (dict "ports" (include "penstock.redis.ports" . | fromJsonArray)) | nindent 4 }}
{{- end }}

{{- define "penstock.net.toKubernetes" -}}
{{- /* Empty with Cilium, which does not match the API server by address: see networkpolicy-cilium.yaml. */ -}}
{{- if not .Values.networkPolicy.cilium }}
- to:
    {{- toYaml .Values.networkPolicy.kubernetesApi.peers | nindent 4 }}
  ports:
    {{- include "penstock.net.ports" (dict "ports" .Values.networkPolicy.kubernetesApi.ports) | nindent 4 }}
{{- end }}
{{- end }}

{{- define "penstock.net.toStore" -}}
{{- if eq .Values.storage.kind "s3" }}
- to:
    {{- toYaml .Values.networkPolicy.objectStore.peers | nindent 4 }}
  ports:
    {{- include "penstock.net.ports" (dict "ports" (include "penstock.storage.ports" . | fromJsonArray)) | nindent 4 }}
{{- end }}
{{- end }}

{{- define "penstock.net.opening" -}}
{{- /* The first lines of a policy: (dict "root" $ "component" "api") */ -}}
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  {{- include "penstock.metadata" (dict "root" .root "name" (printf "%s-%s" (include "penstock.fullname" .root) .component) "component" .component) | nindent 2 }}
spec:
  policyTypes: [Ingress, Egress]
  podSelector:
    matchLabels:
      {{- include "penstock.selectorLabels" . | nindent 6 }}
{{- end }}

{{- define "penstock.net.metrics" -}}
{{ include "penstock.net.fromPrometheus" . }}
  ports:
    - port: 9400
      endPort: 9499
      protocol: TCP
    {{- if (.Values.metrics.podMonitor | default dict).enabled }}
    # Ray's own metrics.
    - port: 8080
      protocol: TCP
    {{- end }}
{{- end }}

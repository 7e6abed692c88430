{{/* Names, labels and images that all components share. */}}

{{- define "penstock.fullname" -}}
{{- $name := .Values.nameOverride | default .Chart.Name -}}
{{- $both := contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) -}}
{{- .Values.fullnameOverride | default $both | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{- define "penstock.selectorLabels" -}}
{{- /* (dict "root" $ "component" "api"); without a component: every pod of the release */ -}}
app.kubernetes.io/name: {{ .root.Values.nameOverride | default .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end }}

{{- define "penstock.labels" -}}
{{- /* (dict "root" $ "component" "api" "more" .Values.ray.labels) */ -}}
{{ include "penstock.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- with merge dict (.more | default dict) (.root.Values.commonLabels | default dict) }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "penstock.podLabels" -}}
{{- /* Without the chart's version and `commonLabels`: neither must replace pods. */ -}}
{{ include "penstock.selectorLabels" . }}
{{- with merge dict (.more | default dict) (.root.Values.podLabels | default dict) }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "penstock.metadata" -}}
{{- /* (dict "root" $ "name" "F-api" "component" "api" "more" .Values.ray.labels) */ -}}
name: {{ .name }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "penstock.labels" . | nindent 2 }}
{{- end }}

{{- define "penstock.image" -}}
{{- /* (dict "root" $ "flavour" "cpu") */ -}}
{{- $image := get .root.Values.image .flavour | default dict -}}
{{- if $image.digest -}}
{{ .root.Values.image.repository }}@{{ $image.digest }}
{{- else -}}
{{ .root.Values.image.repository }}:{{ $image.tag | default (printf "%s-%s" .root.Chart.AppVersion .flavour) }}
{{- end -}}
{{- end }}

{{- define "penstock.redis.image" -}}
{{- with .Values.redis.image -}}
{{ .repository }}{{ empty .digest | ternary (printf ":%s" .tag) (printf "@%s" .digest) }}
{{- end -}}
{{- end }}

{{/* Servers of trackers. Only cpu pods, where trackers run, reach them and have their credentials. */}}

{{- define "penstock.tracking.keys" -}}
{{- /* The keys of the Secret, each of which may be absent; as JSON. */ -}}
{{ list "WANDB_API_KEY" "MLFLOW_TRACKING_TOKEN" "MLFLOW_TRACKING_USERNAME" "MLFLOW_TRACKING_PASSWORD" | toJson }}
{{- end }}

{{- define "penstock.tracking.env" -}}
{{- /* (dict "root" $ "own" $own): for a cpu pod. `own`: the names that the values set themselves. */ -}}
{{- $tracking := .root.Values.tracking | default dict -}}
{{- $own := .own -}}
{{- if $tracking.enabled -}}
{{- range $name, $value := dict "MLFLOW_TRACKING_URI" $tracking.mlflow "WANDB_BASE_URL" $tracking.wandb }}
{{- if and $value (not (hasKey $own $name)) }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end }}
{{- range $key := include "penstock.tracking.keys" . | fromJsonArray }}
{{- if and $tracking.existingSecret (not (hasKey $own $key)) }}
- name: {{ $key }}
  valueFrom:
    secretKeyRef:
      name: {{ $tracking.existingSecret }}
      key: {{ $key }}
      optional: true
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "penstock.tracking.checksum" -}}
{{- /* Credentials are environment variables, which are read once, at the start. */ -}}
{{ get (lookup "v1" "Secret" .Release.Namespace .Values.tracking.existingSecret | default dict) "data" | toJson | sha256sum }}
{{- end }}

{{- define "penstock.net.toTrackers" -}}
{{- $tracking := .Values.tracking | default dict -}}
{{- if $tracking.enabled -}}
{{- /* The values of a release from before these sections existed have none (helm upgrade --reuse-values). */ -}}
{{- $reach := .Values.networkPolicy.tracking | default dict -}}
{{- $anywhere := list (dict "ipBlock" (dict "cidr" "0.0.0.0/0" "except" (list "169.254.0.0/16"))) -}}
{{- $ports := list -}}
{{- range list ($tracking.mlflow | default "") ($tracking.wandb | default "https://api.wandb.ai") -}}
{{- if . -}}
{{- $url := urlParse . -}}
{{- $port := regexFind "[0-9]+$" (regexFind ":[0-9]+$" $url.host) | default (eq $url.scheme "http" | ternary "80" "443") -}}
{{- $ports = append $ports (int $port) | uniq -}}
{{- end -}}
{{- end -}}
- to:
    {{- toYaml (hasKey $reach "peers" | ternary $reach.peers $anywhere) | nindent 4 }}
  ports:
    {{- include "penstock.net.ports" (dict "ports" ($reach.ports | default $ports)) | nindent 4 }}
{{- end }}
{{- end }}

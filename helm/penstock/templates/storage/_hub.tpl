{{/* The Hugging Face Hub. Only cpu pods, which prepare models and data, reach it and have its token. */}}

{{- define "penstock.hub.env" -}}
{{- /* (dict "root" $ "own" $own): for a cpu pod. `own`: the names that the values set themselves. */ -}}
{{- $hub := .root.Values.hub | default dict -}}
{{- if not $hub.enabled -}}
{{- if not (hasKey .own "HF_HUB_OFFLINE") }}
- name: HF_HUB_OFFLINE
  value: "1"
{{- end }}
{{- else -}}
{{- if and $hub.endpoint (not (hasKey .own "HF_ENDPOINT")) }}
- name: HF_ENDPOINT
  value: {{ $hub.endpoint | quote }}
{{- end }}
{{- if and $hub.existingSecret (not (hasKey .own "HF_TOKEN")) }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ $hub.existingSecret }}
      key: HF_TOKEN
{{- end }}
{{- end }}
{{- end }}

{{- define "penstock.hub.checksum" -}}
{{- /* The token is an environment variable, which is read once, at the start. */ -}}
{{ get (lookup "v1" "Secret" .Release.Namespace .Values.hub.existingSecret | default dict) "data" | toJson | sha256sum }}
{{- end }}

{{- define "penstock.net.toHub" -}}
{{- $hub := .Values.hub | default dict -}}
{{- if $hub.enabled -}}
{{- /* The values of a release from before these sections existed have none (helm upgrade --reuse-values). */ -}}
{{- $reach := .Values.networkPolicy.hub | default dict -}}
{{- $anywhere := list (dict "ipBlock" (dict "cidr" "0.0.0.0/0" "except" (list "169.254.0.0/16"))) -}}
{{- $url := urlParse ($hub.endpoint | default "") -}}
{{- $port := regexFind "[0-9]+$" (regexFind ":[0-9]+$" $url.host) | default (eq $url.scheme "http" | ternary "80" "443") -}}
- to:
    {{- toYaml (hasKey $reach "peers" | ternary $reach.peers $anywhere) | nindent 4 }}
  ports:
    {{- include "penstock.net.ports" (dict "ports" ($reach.ports | default (list (int $port)))) | nindent 4 }}
{{- end }}
{{- end }}

{{/* What verifier pods reach and know for rewards over HTTP, judge models and functions with needs. */}}

{{- define "penstock.code.namespaces" -}}
{{- /* (dict "role" "verifier-code" "of" .Values.verifierCode): "true" if its programs get namespaces by bubblewrap. */ -}}
{{- if and (eq .role "verifier-code") (eq (.of.isolation | default "") "bubblewrap") -}}true{{- end -}}
{{- end }}

{{- define "penstock.rewards.env" -}}
{{- /* (dict "root" $ "role" "verifier"). The hosts are always set: without the variable a verifier allows any host. */ -}}
{{- $verifier := eq .role "verifier" -}}
- name: PENSTOCK_REWARD_HOSTS
  value: {{ $verifier | ternary (join "," (.root.Values.verifier.rewardHosts | default list)) "" | quote }}
{{- if and $verifier (include "penstock.functions.enabled" .root) }}
- name: PENSTOCK_FUNCTIONS_URL
  value: http://{{ include "penstock.fullname" .root }}-functions:8480
- name: PENSTOCK_FUNCTIONS_SECRET_FILE
  value: /etc/penstock/functions/secret
{{- end }}
{{- end }}

{{- define "penstock.rewards.checksums" -}}
{{- /* Annotations of verifier pods: keys and secrets are read once, at the start. */ -}}
{{- with .Values.verifier.rewardSecret }}
checksum/reward-auth: {{ get (lookup "v1" "Secret" $.Release.Namespace . | default dict) "data" | toJson | sha256sum }}
{{- end }}
{{- if include "penstock.functions.enabled" . }}
checksum/functions-auth: {{ include "penstock.functions.checksum" . }}
{{- end }}
{{- end }}

{{- define "penstock.rewards.limits" -}}
{{- /* What the API allows recipes, as JSON: empty if nothing. */ -}}
{{- $limits := dict -}}
{{- with .Values.verifier.rewardHosts -}}{{- $_ := set $limits "hosts" . -}}{{- end -}}
{{- if include "penstock.functions.enabled" . -}}{{- $_ := set $limits "functions" true -}}{{- end -}}
{{ toJson $limits }}
{{- end }}

{{- define "penstock.net.toRewards" -}}
{{- with .Values.verifier.rewardEgress }}
{{ toYaml . }}
{{- end }}
{{- if include "penstock.functions.enabled" . }}
- to:
    {{- include "penstock.net.pods" (dict "root" . "components" (list "functions")) | nindent 4 }}
  ports:
    {{- include "penstock.net.ports" (dict "ports" (list 8480)) | nindent 4 }}
{{- end }}
{{- end }}

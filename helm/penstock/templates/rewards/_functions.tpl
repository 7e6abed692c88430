{{/* The pods that run users' functions which need network or files: none of Penstock's variables, Secrets or accounts. */}}

{{- define "penstock.functions.enabled" -}}
{{- if (.Values.rewardFunctions | default dict).enabled -}}true{{- end -}}
{{- end }}

{{- define "penstock.functions.secretName" -}}
{{ .Values.rewardFunctions.existingSecret | default (printf "%s-functions" (include "penstock.fullname" .)) }}
{{- end }}

{{- define "penstock.functions.secret" -}}
{{- /* Base64. Generated once per rendering; an existing Secret is kept. */ -}}
{{- if not (hasKey .Values "functionsSecret") -}}
{{- $found := lookup "v1" "Secret" .Release.Namespace (include "penstock.functions.secretName" .) | default dict -}}
{{- $_ := set .Values "functionsSecret" (get ($found.data | default dict) "secret" | default (randAlphaNum 48 | b64enc)) -}}
{{- end -}}
{{ .Values.functionsSecret }}
{{- end }}

{{- define "penstock.functions.checksum" -}}
{{- $data := include "penstock.functions.secret" . -}}
{{- with .Values.rewardFunctions.existingSecret -}}
{{- $data = get (lookup "v1" "Secret" $.Release.Namespace . | default dict) "data" | toJson -}}
{{- end -}}
{{ sha256sum $data }}
{{- end }}

{{- define "penstock.functions.mounts" -}}
{{- if include "penstock.functions.enabled" . }}
- name: functions-auth
  mountPath: /etc/penstock/functions
  readOnly: true
{{- end }}
{{- end }}

{{- define "penstock.functions.volumes" -}}
{{- if include "penstock.functions.enabled" . }}
- name: functions-auth
  secret:
    secretName: {{ include "penstock.functions.secretName" . }}
    defaultMode: 0440
    items:
      - key: secret
        path: secret
{{- end }}
{{- end }}

{{/* Who may use the API: the access file, and tokens that the chart generates. */}}

{{- define "penstock.access.secretName" -}}
{{ .Values.api.access.existingSecret | default (printf "%s-access" (include "penstock.fullname" .)) }}
{{- end }}

{{- define "penstock.access.tokens" -}}
{{- /* Tokens by key, as YAML. Generated once per rendering; those of an existing Secret are kept. */ -}}
{{- if not (hasKey .Values "accessTokens") -}}
{{- $found := lookup "v1" "Secret" .Release.Namespace (include "penstock.access.secretName" .) | default dict -}}
{{- $made := dict -}}
{{- range list "admin-token" "test-token" "prometheus-token" -}}
{{- $_ := set $made . (get ($found.data | default dict) . | b64dec | default (randAlphaNum 43)) -}}
{{- end -}}
{{- $_ := set .Values "accessTokens" $made -}}
{{- end -}}
{{ toYaml .Values.accessTokens }}
{{- end }}

{{- define "penstock.access.file" -}}
{{- /* services/api/access/settings.py describes the file. */ -}}
{{- $roles := dict "admin-token" "admin" "test-token" "operator" "prometheus-token" "viewer" -}}
{{- $tokens := list -}}
{{- range $key, $token := include "penstock.access.tokens" . | fromYaml -}}
{{- $tokens = append $tokens (dict "name" $key "sha256" (sha256sum $token) "roles" (dict "*" (get $roles $key))) -}}
{{- end -}}
{{- $access := .Values.api.access -}}
{{- $file := dict "tokens" (concat $tokens ($access.tokens | default list)) "projects" ($access.projects | default dict) -}}
{{- if ($access.oidc | default dict).issuer }}{{ $_ := set $file "oidc" $access.oidc }}{{ end -}}
{{ toYaml $file }}
{{- end }}

{{- define "penstock.access.hosts" -}}
{{- /* The names by which clients reach the API; others are refused, which stops DNS rebinding. */ -}}
{{- $name := printf "%s-api" (include "penstock.fullname" .) -}}
{{- $hosts := list $name (printf "%s.%s" $name .Release.Namespace) (printf "%s.%s.svc" $name .Release.Namespace)
      (printf "%s.%s.svc.cluster.local" $name .Release.Namespace) -}}
{{- with .Values.api.ingress }}{{ if .enabled }}{{ $hosts = append $hosts .host }}{{ end }}{{ end -}}
{{ concat $hosts .Values.api.hosts | join "," }}
{{- end }}

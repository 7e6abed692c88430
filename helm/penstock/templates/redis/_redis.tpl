{{/* Address and credentials of Redis: the chart's own, or an external one. */}}

{{- define "penstock.redis.secretName" -}}
{{ .Values.redis.existingSecret | default (printf "%s-redis" (include "penstock.fullname" .)) }}
{{- end }}

{{- define "penstock.redis.tlsSecret" -}}
{{- /* The Secret with the certificate of the chart's own server; empty: no TLS. Values of an older release have none. */ -}}
{{- if not .Values.redis.external.enabled -}}{{ dig "existingSecret" "" (.Values.redis.tls | default dict) }}{{- end -}}
{{- end }}

{{- define "penstock.redis.ownScheme" -}}
{{ include "penstock.redis.tlsSecret" . | empty | ternary "redis" "rediss" }}
{{- end }}

{{- define "penstock.redis.caSecret" -}}
{{- /* The Secret with the authority of the server's certificate in ca.crt; empty: the image's authorities, or no TLS. */ -}}
{{ .Values.redis.external.enabled | ternary (.Values.redis.external.caSecret | default "") (include "penstock.redis.tlsSecret" .) }}
{{- end }}

{{- define "penstock.redis.url" -}}
{{- /* Without credentials, which are files. */ -}}
{{- $external := .Values.redis.external -}}
{{- if not $external.enabled -}}
{{ include "penstock.redis.ownScheme" . }}://{{ include "penstock.fullname" . }}-redis:6379/0
{{- else -}}
{{- $scheme := $external.tls | ternary "rediss" "redis" -}}
{{- with $external.sentinel.addresses -}}
{{ $scheme }}+sentinel://{{ join "," . }}/{{ $external.sentinel.service }}/{{ $external.database | default 0 }}
{{- else -}}
{{ $scheme }}://{{ $external.address }}/{{ $external.database | default 0 }}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "penstock.redis.rayAddress" -}}
{{- $external := .Values.redis.external -}}
{{- if not $external.enabled -}}
{{ include "penstock.redis.ownScheme" . }}://{{ include "penstock.fullname" . }}-redis:6379
{{- else -}}
{{ $external.tls | ternary "rediss" "redis" }}://{{ $external.rayAddress | default $external.address }}
{{- end -}}
{{- end }}

{{- define "penstock.redis.username" -}}
{{ .Values.redis.external.enabled | ternary (.Values.redis.external.username | default "") "penstock" }}
{{- end }}

{{- define "penstock.redis.rayUsername" -}}
{{ .Values.redis.external.enabled | ternary (.Values.redis.external.rayUsername | default "") "ray" }}
{{- end }}

{{- define "penstock.redis.passwords" -}}
{{- /* Base64, as YAML. Generated once per rendering; an existing Secret is kept. */ -}}
{{- if not (hasKey .Values "redisPasswords") -}}
{{- $found := lookup "v1" "Secret" .Release.Namespace (include "penstock.redis.secretName" .) | default dict -}}
{{- $made := dict -}}
{{- range list "penstock-password" "ray-password" -}}
{{- $_ := set $made . (get ($found.data | default dict) . | default (randAlphaNum 40 | b64enc)) -}}
{{- end -}}
{{- $_ := set .Values "redisPasswords" $made -}}
{{- end -}}
{{ toYaml .Values.redisPasswords }}
{{- end }}

{{- define "penstock.redis.ports" -}}
{{- /* Ports for the NetworkPolicy, as JSON. */ -}}
{{- $external := .Values.redis.external -}}
{{- $ports := list 6379 -}}
{{- if $external.enabled -}}
{{- $given := concat (compact (list $external.address $external.rayAddress)) $external.sentinel.addresses -}}
{{- $ports = empty $external.sentinel.addresses | ternary list (list 6379) -}}
{{- range $given -}}{{- $ports = append $ports (splitList ":" . | last | int) -}}{{- end -}}
{{- $ports = .Values.networkPolicy.externalRedis.ports | default $ports -}}
{{- end -}}
{{ $ports | uniq | toJson }}
{{- end }}

{{- define "penstock.redis.env" -}}
- name: PENSTOCK_REDIS
  value: {{ include "penstock.redis.url" . | quote }}
{{- with include "penstock.redis.username" . }}
- name: PENSTOCK_REDIS_USERNAME
  value: {{ . | quote }}
{{- end }}
- name: PENSTOCK_REDIS_PASSWORD_FILE
  value: /etc/penstock/redis-auth/penstock-password
{{- if .Values.redis.external.enabled }}
{{- with .Values.redis.external.sentinel.passwordKey }}
- name: PENSTOCK_REDIS_SENTINEL_PASSWORD_FILE
  value: /etc/penstock/redis-auth/{{ . }}
{{- end }}
{{- end }}
{{- if include "penstock.redis.caSecret" . }}
- name: PENSTOCK_REDIS_CA_FILE
  value: /etc/penstock/redis-ca/ca.crt
{{- end }}
{{- end }}

{{- define "penstock.redis.mounts" -}}
- name: redis-auth
  mountPath: /etc/penstock/redis-auth
  readOnly: true
{{- if include "penstock.redis.caSecret" . }}
- name: redis-ca
  mountPath: /etc/penstock/redis-ca
  readOnly: true
{{- end }}
{{- end }}

{{- define "penstock.redis.volumes" -}}
{{- /* Penstock's processes get their own password, not Ray's. */ -}}
- name: redis-auth
  secret:
    secretName: {{ include "penstock.redis.secretName" . }}
    defaultMode: 0440
    items:
      - key: penstock-password
        path: penstock-password
      {{- if .Values.redis.external.enabled }}
      {{- with .Values.redis.external.sentinel.passwordKey }}
      - key: {{ . }}
        path: {{ . }}
      {{- end }}
      {{- end }}
{{- with include "penstock.redis.caSecret" . }}
- name: redis-ca
  secret:
    secretName: {{ . }}
    defaultMode: 0444
    items:
      - key: ca.crt
        path: ca.crt
{{- end }}
{{- end }}

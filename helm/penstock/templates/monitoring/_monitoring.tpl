{{/* The labels that tell releases apart, on what is scraped and in the rules. */}}

{{- define "penstock.monitoring.labels" -}}
- targetLabel: namespace
  replacement: {{ .Release.Namespace | quote }}
- targetLabel: release
  replacement: {{ .Release.Name | quote }}
{{- end }}

{{- define "penstock.monitoring.scoped" -}}
{{- /* (dict "root" $ "groups" (list ...)): rules that see only this release, so that each release can bring its own. */ -}}
{{- $root := .root -}}
{{- $own := printf "namespace=%q, release=%q" $root.Release.Namespace $root.Release.Name -}}
{{- $metric := `\b((?:run:)?(?:penstock_\w+(?::\w+)?|vllm:\w+|up))` -}}
{{- /* The values of an older release have no `operator`. */ -}}
{{- $operator := merge (deepCopy ($root.Values.metrics.rules.operator | default dict)) (dict "namespace" "kuberay-system" "deployment" "kuberay-operator") -}}
{{- range $group := .groups -}}
{{- $rules := list -}}
{{- range .rules -}}
{{- /* A suspended cluster has no head, and so no controller that could be absent. */ -}}
{{- if not (and $root.Values.ray.suspend (eq (.alert | default "") "ControllerAbsent")) -}}{{- $rules = append $rules . -}}{{- end -}}
{{- $expr := regexReplaceAll (printf `%s\{` $metric) .expr (printf "${1}{%s, " $own) -}}
{{- /* A metric without matchers is followed by neither a brace nor a letter. */ -}}
{{- $expr = regexReplaceAll (printf `%s([^{\w:]|$)` $metric) $expr (printf "${1}{%s}${2}" $own) -}}
{{- $expr = $expr | replace "OPERATOR_NAMESPACE" $operator.namespace | replace "OPERATOR" $operator.deployment -}}
{{- $expr = $expr | replace "NAMESPACE" $root.Release.Namespace | replace "RELEASE" $root.Release.Name -}}
{{- $expr = $expr | replace "FULLNAME" (include "penstock.fullname" $root) | replace "CLAIM" (include "penstock.storage.claimName" $root | trim) -}}
{{- $_ := set . "expr" $expr -}}
{{- end -}}
{{- $_ := set $group "rules" $rules -}}
{{- end -}}
{{ toYaml .groups }}
{{- end }}

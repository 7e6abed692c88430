{{/* The worker groups: what each section of the values says, over what all groups have. */}}

{{- define "penstock.groups" -}}
{{- /* The sections of the worker groups, as JSON; a group's role is its section's name in kebab case. An upgrade that
       reuses the values of an older release has no `verifierCode`. */ -}}
{{- $code := empty .Values.verifierCode | ternary list (list "verifierCode") -}}
{{ concat (list "cpu" "verifier") $code (list "rollout" "learner") | toJson }}
{{- end }}

{{- define "penstock.roles" -}}
{{- $roles := list -}}
{{- range include "penstock.groups" . | fromJsonArray -}}{{- $roles = append $roles (kebabcase .) -}}{{- end -}}
{{ toJson $roles }}
{{- end }}

{{- define "penstock.overlaid" -}}
{{- /* (dict "under" $defaults "over" $own): as JSON. Mappings are merged; lists and scalars replace, 0 and "" too; null
       leaves what is below. Sprig's merge functions would take 0, "" and [] for missing. */ -}}
{{- $result := deepCopy .under -}}
{{- range $key, $value := .over -}}
{{- $below := get $result $key -}}
{{- if and (kindIs "map" $value) (kindIs "map" $below) -}}
{{- $_ := set $result $key (include "penstock.overlaid" (dict "under" $below "over" $value) | fromJson) -}}
{{- else if not (kindIs "invalid" $value) -}}
{{- $_ := set $result $key $value -}}
{{- end -}}
{{- end -}}
{{ toJson $result }}
{{- end }}

{{- define "penstock.groupDefaults" -}}
{{- /* As JSON. The values of an older release have no `groupDefaults`, and null removes one: then these count, which are
       those of values.yaml. */ -}}
{{- $none := dict "requests" dict "nodeSelector" dict "tolerations" list "affinity" dict "topologySpreadConstraints" list "env" list "annotations" dict "extraResources" dict -}}
{{- $own := dict "cpus" 4 "gpuMemoryGiB" nil "memory" "8Gi" "shmSize" "1Gi" "priorityClassName" "" "runtimeClassName" "" "minAvailable" 0 -}}
{{ include "penstock.overlaid" (dict "under" (merge $own $none) "over" (.Values.groupDefaults | default dict)) }}
{{- end }}

{{- define "penstock.sections" -}}
{{- /* The sections of the worker groups with their defaults, as JSON. */ -}}
{{- $sections := dict -}}
{{- range $key := include "penstock.groups" . | fromJsonArray -}}
{{- $under := include "penstock.groupDefaults" $ | fromJson -}}
{{- $_ := set $under "minReplicas" (eq $key "cpu" | ternary 1 0) -}}
{{- $_ := set $under "maxReplicas" 1 -}}
{{- $_ := set $under "gpus" 0 -}}
{{- $_ := set $sections $key (include "penstock.overlaid" (dict "under" $under "over" (get $.Values $key)) | fromJson) -}}
{{- end -}}
{{ toJson $sections }}
{{- end }}

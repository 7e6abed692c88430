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

{{- define "penstock.workers" -}}
{{- /* All worker groups, as JSON: each section's own, then its further `groups`, which take the section's values but not
       its bounds. `at`: the path of its values. */ -}}
{{- $workers := list -}}
{{- $sections := include "penstock.sections" . | fromJson -}}
{{- range $key := include "penstock.groups" . | fromJsonArray -}}
{{- $role := kebabcase $key -}}
{{- $of := omit (get $sections $key) "groups" -}}
{{- $gpu := and (has $role (list "rollout" "learner")) (gt (int $of.gpus) 0) | ternary "-gpu" "" -}}
{{- $workers = append $workers (dict "key" $key "at" $key "role" $role "name" (print $role $gpu) "of" $of) -}}
{{- range $index, $own := (get $sections $key).groups -}}
{{- $under := merge (dict "minReplicas" 0 "maxReplicas" 1 "priority" 0) (omit $of "minReplicas" "maxReplicas" "priority") -}}
{{- $workers = append $workers (dict "key" $key "at" (printf "%s.groups[%d]" $key $index) "role" $role "name" (printf "%s-%s" $role $own.name)
      "of" (include "penstock.overlaid" (dict "under" $under "over" (omit $own "name")) | fromJson)) -}}
{{- end -}}
{{- end -}}
{{ toJson $workers }}
{{- end }}

{{- define "penstock.pods" -}}
{{- /* (dict "root" $ "of" $group): the most pods of a group. Without the autoscaler it has always the minimum. */ -}}
{{ include "penstock.ray.autoscales" .root | empty | ternary .of.minReplicas .of.maxReplicas | int }}
{{- end }}

{{- define "penstock.ray.autoscales" -}}
{{- /* "true" unless it is switched off; the values of an older release do not say. */ -}}
{{- $autoscaler := .Values.ray.autoscaler -}}
{{- if not (and (hasKey $autoscaler "enabled") (not $autoscaler.enabled)) -}}true{{- end -}}
{{- end }}

{{- define "penstock.ray.live" -}}
{{- /* The groups of the live cluster by name, as JSON: Helm replaces whole lists in custom resources, and the autoscaler
       owns the counts in them. */ -}}
{{- $live := dict -}}
{{- if .Capabilities.APIVersions.Has "ray.io/v1/RayCluster" -}}
{{- range dig "spec" "workerGroupSpecs" list (lookup "ray.io/v1" "RayCluster" .Release.Namespace (include "penstock.fullname" .) | default dict) -}}
{{- $_ := set $live .groupName . -}}
{{- end -}}
{{- end -}}
{{ toJson $live }}
{{- end }}

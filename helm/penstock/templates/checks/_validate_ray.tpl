{{/* Checks of the Ray cluster's labels, groups and queue, and of the owner of its name. */}}

{{- define "penstock.validate.labels" -}}
{{- $faults := list -}}
{{- $kubeRay := list "ray.io/cluster" "ray.io/group" "ray.io/identifier" "ray.io/is-ray-node" "ray.io/node-type" -}}
{{- $ray := list "ray.io/ft-enabled" "ray.io/overwrite-container-cmd" -}}
{{- $pods := dict "podLabels" .Values.podLabels "serviceAccount.podLabels" .Values.serviceAccount.podLabels -}}
{{- range $path, $labels := merge $pods (dict "commonLabels" .Values.commonLabels "ray.labels" .Values.ray.labels "ray.annotations" .Values.ray.annotations) -}}
{{- range $label, $_ := $labels -}}
{{- $taken := or (regexMatch "^(app[.]kubernetes[.]io|(meta[.])?helm[.]sh|penstock[.]dev)/" $label) (has $label (concat $kubeRay $ray)) -}}
{{- if $taken -}}
{{- $faults = append $faults (printf "%s: %q is not valid: expected a name that neither the chart nor KubeRay sets" $path $label) -}}
{{- else if and (not (hasPrefix "ray." $path)) (regexMatch "^([a-z0-9.-]+[.])?(kueue[.]x-k8s[.]io|ray[.]io|volcano[.]sh)/" $label) -}}
{{- /* Queues admit the RayCluster. On an API pod, Redis or a Job they would hold back that, too. */ -}}
{{- $faults = append $faults (printf "%s: %q is not valid: expected it in ray.labels, because a queue or KubeRay would act on every object that has it" $path $label) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{ toJson $faults }}
{{- end }}

{{- define "penstock.validate.queue" -}}
{{- /* What Kueue's webhook would reject, and a fixed cluster that could not run anything. */ -}}
{{- $faults := list -}}
{{- $autoscales := include "penstock.ray.autoscales" . -}}
{{- $queue := get (.Values.ray.labels | default dict) "kueue.x-k8s.io/queue-name" -}}
{{- if and $queue $autoscales (not (include "penstock.ray.elastic" .)) -}}
{{- $faults = append $faults (printf "ray.labels: kueue.x-k8s.io/queue-name = %q is not valid: expected ray.annotations `kueue.x-k8s.io/elastic-job: \"true\"` beside it (Kueue 0.18 or newer), or ray.autoscaler.enabled: false, because Kueue rejects other clusters with an autoscaler" $queue) -}}
{{- end -}}
{{- if and (include "penstock.ray.elastic" .) (not $queue) -}}
{{- $faults = append $faults "ray.annotations: kueue.x-k8s.io/elastic-job = \"true\" is not valid: expected ray.labels `kueue.x-k8s.io/queue-name` beside it, because without a queue no pod would start" -}}
{{- end -}}
{{- $scheduler := get (.Values.ray.labels | default dict) "ray.io/scheduler-name" -}}
{{- if and $scheduler .Values.ray.schedulerName -}}
{{- $faults = append $faults (printf "ray.schedulerName: %q is not valid: expected \"\", because ray.labels has ray.io/scheduler-name = %q, and KubeRay then sets the scheduler of all Ray pods" .Values.ray.schedulerName $scheduler) -}}
{{- end -}}
{{- if and $queue .Values.ray.suspend -}}
{{- $faults = append $faults "ray.suspend: true is not valid: expected false, because ray.labels has a queue of Kueue, which alone suspends the cluster" -}}
{{- end -}}
{{- if not $autoscales -}}
{{- range $role := list "verifier" "rollout" "learner" -}}
{{- $least := 0 -}}
{{- range include "penstock.workers" $ | fromJsonArray -}}{{- if eq .role $role -}}{{- $least = add $least (int .of.minReplicas) -}}{{- end -}}{{- end -}}
{{- if not $least -}}
{{- $faults = append $faults (printf "%s.minReplicas: 0 is not valid: expected at least 1, because ray.autoscaler.enabled is false: every group keeps its minimum" $role) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{ toJson $faults }}
{{- end }}

{{- define "penstock.validate.names" -}}
{{- $faults := list -}}
{{- $workers := include "penstock.workers" . | fromJsonArray -}}
{{- $names := list -}}
{{- range $workers -}}{{- if eq .at .key -}}{{- $names = append $names .name -}}{{- end -}}{{- end -}}
{{- range $workers -}}
{{- if and (ne .at .key) (has .name $names) -}}
{{- $faults = append $faults (printf "%s.name: %q is not valid: expected a name that makes the group's own unique (%s is another group)" .at (trimPrefix (print .role "-") .name) .name) -}}
{{- end -}}
{{- $names = append $names .name -}}
{{- end -}}
{{ toJson $faults }}
{{- end }}

{{- define "penstock.validate.owner" -}}
{{- /* Another release, or other manifests, with the same full name: two clusters would fight for each object. */ -}}
{{- $faults := list -}}
{{- $name := include "penstock.fullname" . -}}
{{- $kinds := dict "RayCluster" (list "ray.io/v1" $name) "Deployment" (list "apps/v1" (print $name "-api")) "StatefulSet" (list "apps/v1" (print $name "-redis")) -}}
{{- range $kind, $where := $kinds -}}
{{- if $.Capabilities.APIVersions.Has (printf "%s/%s" (index $where 0) $kind) -}}
{{- $metadata := get (lookup (index $where 0) $kind $.Release.Namespace (index $where 1) | default dict) "metadata" | default dict -}}
{{- $owner := get ($metadata.annotations | default dict) "meta.helm.sh/release-name" | default (get ($metadata.labels | default dict) "app.kubernetes.io/instance") -}}
{{- if and $metadata (ne ($owner | default "") $.Release.Name) -}}
{{- $whose := empty $owner | ternary "of no release" (printf "of release %s" $owner) -}}
{{- $faults = append $faults (printf "fullnameOverride: %q is not valid: expected another name, because namespace %s has the %s %s %s; or install into another namespace" $.Values.fullnameOverride $.Release.Namespace $kind (index $where 1) $whose) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{ first $faults | list | compact | toJson }}
{{- end }}

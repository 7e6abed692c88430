{{/* Requirements on the cluster, checked before any object is created: one line per fault, with the command that fixes it. */}}

{{- define "penstock.validate.apis" -}}
{{- $faults := list -}}
{{- $repository := "https://ray-project.github.io/kuberay-helm/" -}}
{{- if not (.Capabilities.APIVersions.Has "ray.io/v1/RayCluster") -}}
{{- $faults = append $faults (printf "KubeRay is missing (no ray.io/v1): expected 1.7 or newer; helm install kuberay-operator kuberay-operator --repo %s --namespace kuberay-system --create-namespace" $repository) -}}
{{- else if .Values.ray.checkOperator -}}
{{- /* `lookup` finds nothing without a cluster. The fields are below the version's schema. */ -}}
{{- range dig "spec" "versions" list (lookup "apiextensions.k8s.io/v1" "CustomResourceDefinition" "" "rayclusters.ray.io" | default dict) -}}
{{- $options := dig "schema" "openAPIV3Schema" "properties" "spec" "properties" "autoscalerOptions" "properties" dict . -}}
{{- if and (eq .name "v1") (not (and (hasKey $options "command") (hasKey $options "args"))) -}}
{{- $faults = append $faults (printf "KubeRay is too old (its RayCluster has no autoscalerOptions.command): expected 1.7 or newer. Helm does not upgrade CRDs, so apply those of the new version first: helm show crds kuberay-operator --repo %s | kubectl apply --server-side --force-conflicts -f -, then helm upgrade kuberay-operator kuberay-operator --repo %s --namespace kuberay-system" $repository $repository) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $wanted := dict "serviceMonitor" "v1/ServiceMonitor" "scrapeConfig" "v1alpha1/ScrapeConfig" "podMonitor" "v1/PodMonitor" "rules" "v1/PrometheusRule" -}}
{{- range $value, $kind := $wanted -}}
{{- if and (get $.Values.metrics $value | default dict).enabled (not ($.Capabilities.APIVersions.Has (printf "monitoring.coreos.com/%s" $kind))) -}}
{{- $faults = append $faults (printf "metrics.%s.enabled: true is not valid: expected false, because the cluster has no monitoring.coreos.com/%s; to add it: helm install prometheus-operator-crds prometheus-operator-crds --repo https://prometheus-community.github.io/helm-charts" $value $kind) -}}
{{- end -}}
{{- end -}}
{{- $labels := .Values.ray.labels | default dict -}}
{{- $queue := get $labels "kueue.x-k8s.io/queue-name" -}}
{{- $kueue := or (.Capabilities.APIVersions.Has "kueue.x-k8s.io/v1beta2/LocalQueue") (.Capabilities.APIVersions.Has "kueue.x-k8s.io/v1beta1/LocalQueue") -}}
{{- if and $queue (not $kueue) -}}
{{- $faults = append $faults (printf "ray.labels: kueue.x-k8s.io/queue-name = %q is not valid: expected no queue of Kueue, because the cluster has no kueue.x-k8s.io/LocalQueue: nothing would admit the pods" $queue) -}}
{{- end -}}
{{- if and (eq (get $labels "ray.io/scheduler-name" | default "") "volcano") (not (.Capabilities.APIVersions.Has "scheduling.volcano.sh/v1beta1/PodGroup")) -}}
{{- $faults = append $faults "ray.labels: ray.io/scheduler-name = \"volcano\" is not valid: expected no scheduler of Volcano, because the cluster has no scheduling.volcano.sh/v1beta1/PodGroup: KubeRay would start no pod" -}}
{{- end -}}
{{- if and .Values.networkPolicy.enabled .Values.networkPolicy.cilium (not (.Capabilities.APIVersions.Has "cilium.io/v2/CiliumNetworkPolicy")) -}}
{{- $faults = append $faults "networkPolicy.cilium: true is not valid: expected false, because the cluster has no cilium.io/v2/CiliumNetworkPolicy: its network plug-in is not Cilium, or does not serve that kind" -}}
{{- end -}}
{{ toJson $faults }}
{{- end }}

{{- define "penstock.validate.secrets" -}}
{{- /* By the value that names it, as JSON: the Secret, its keys, and its kind for `kubectl create secret`. */ -}}
{{- $wanted := dict -}}
{{- $sentinel := .Values.redis.external.enabled | ternary .Values.redis.external.sentinel.passwordKey "" -}}
{{- $_ := set $wanted "redis.existingSecret" (dict "name" .Values.redis.existingSecret "keys" (compact (list "penstock-password" "ray-password" $sentinel))) -}}
{{- if .Values.redis.external.enabled -}}
{{- $_ := set $wanted "redis.external.caSecret" (dict "name" .Values.redis.external.caSecret "keys" (list "ca.crt")) -}}
{{- end -}}
{{- with include "penstock.redis.tlsSecret" . -}}
{{- $_ := set $wanted "redis.tls.existingSecret" (dict "name" . "keys" (list "tls.crt" "tls.key" "ca.crt")) -}}
{{- end -}}
{{- if eq .Values.storage.kind "s3" -}}
{{- $_ := set $wanted "storage.s3.existingSecret" (dict "name" .Values.storage.s3.existingSecret "keys" (list "AWS_ACCESS_KEY_ID" "AWS_SECRET_ACCESS_KEY")) -}}
{{- end -}}
{{- $hub := .Values.hub | default dict -}}
{{- if $hub.enabled -}}
{{- $_ := set $wanted "hub.existingSecret" (dict "name" ($hub.existingSecret | default "") "keys" (list "HF_TOKEN")) -}}
{{- end -}}
{{- $tracking := .Values.tracking | default dict -}}
{{- if $tracking.enabled -}}
{{- $_ := set $wanted "tracking.existingSecret" (dict "name" ($tracking.existingSecret | default "") "keys" list "source" "WANDB_API_KEY") -}}
{{- end -}}
{{- if .Values.api.ingress.enabled -}}
{{- $_ := set $wanted "api.ingress.tlsSecret" (dict "name" .Values.api.ingress.tlsSecret "keys" (list "tls.crt" "tls.key") "kind" "tls") -}}
{{- end -}}
{{- $_ := set $wanted "verifier.rewardSecret" (dict "name" (.Values.verifier.rewardSecret | default "") "keys" list "source" "PENSTOCK_REWARD_KEY") -}}
{{- if include "penstock.functions.enabled" . -}}
{{- $_ := set $wanted "rewardFunctions.existingSecret" (dict "name" (.Values.rewardFunctions.existingSecret | default "") "keys" (list "secret")) -}}
{{- end -}}
{{- $_ := set $wanted "ray.authSecret" (dict "name" .Values.ray.authSecret "keys" (list "auth_token")) -}}
{{- range $at, $secret := .Values.imagePullSecrets -}}
{{- $_ := set $wanted (printf "imagePullSecrets[%d].name" $at) (dict "name" $secret.name "keys" (list ".dockerconfigjson") "kind" "docker-registry" "type" "kubernetes.io/dockerconfigjson") -}}
{{- end -}}
{{ toJson $wanted }}
{{- end }}

{{- define "penstock.validate.remedy" -}}
{{- /* (dict "namespace" "n" "wanted" $wanted): the command that creates such a Secret. */ -}}
{{- $sources := list -}}
{{- range .wanted.keys -}}{{- $sources = append $sources (printf "--from-file=%s=FILE" .) -}}{{- end -}}
{{- with .wanted.source -}}{{- $sources = list (printf "--from-file=%s=FILE" .) -}}{{- end -}}
{{- if eq (.wanted.kind | default "") "tls" -}}{{- $sources = list "--cert=FILE" "--key=FILE" -}}{{- end -}}
kubectl --namespace {{ .namespace }} create secret {{ .wanted.kind | default "generic" }} {{ .wanted.name }} {{ join " " $sources }}
{{- end }}

{{- define "penstock.validate.objects" -}}
{{- $faults := list -}}
{{- $namespace := .Release.Namespace -}}
{{- range $value, $wanted := include "penstock.validate.secrets" . | fromJson -}}
{{- if $wanted.name -}}
{{- $secret := lookup "v1" "Secret" $namespace $wanted.name -}}
{{- $missing := list -}}
{{- range $wanted.keys -}}
{{- if not (hasKey (get ($secret | default dict) "data" | default dict) .) -}}{{- $missing = append $missing . -}}{{- end -}}
{{- end -}}
{{- $remedy := include "penstock.validate.remedy" (dict "namespace" $namespace "wanted" $wanted) -}}
{{- if not $secret -}}
{{- $faults = append $faults (printf "%s: %q is not valid: expected a Secret in namespace %s; to create it: %s" $value $wanted.name $namespace $remedy) -}}
{{- else if and $wanted.type (ne $secret.type $wanted.type) -}}
{{- /* Nodes ignore a Secret of another type, whatever its keys, and a type cannot be changed. */ -}}
{{- $faults = append $faults (printf "%s: %q is not valid: its type is %s, expected %s; to replace it: kubectl --namespace %s delete secret %s && %s" $value $wanted.name $secret.type $wanted.type $namespace $wanted.name $remedy) -}}
{{- else if $missing -}}
{{- $faults = append $faults (printf "%s: %q is not valid: expected the key %s in the Secret; to add it: %s --dry-run=client -o yaml | kubectl apply -f -" $value $wanted.name (join ", " $missing) $remedy) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $claim := (.Values.storage.claim | default dict).existingClaim -}}
{{- if and (eq .Values.storage.kind "claim") $claim (not (lookup "v1" "PersistentVolumeClaim" $namespace $claim)) -}}
{{- $faults = append $faults (printf "storage.claim.existingClaim: %q is not valid: expected a PersistentVolumeClaim in namespace %s; create it with kubectl --namespace %s apply, or leave the value empty" $claim $namespace $namespace) -}}
{{- end -}}
{{ concat $faults (include "penstock.validate.redisVolume" . | fromJsonArray) (include "penstock.validate.rewardSecret" . | fromJsonArray) | toJson }}
{{- end }}

{{- define "penstock.validate.redisVolume" -}}
{{- /* Fields that Kubernetes does not change in a StatefulSet, with the commands that change them anyway. */ -}}
{{- $faults := list -}}
{{- $name := printf "%s-redis" (include "penstock.fullname" .) -}}
{{- $kubectl := printf "kubectl --namespace %s" .Release.Namespace -}}
{{- $again := printf "%s delete statefulset %s --cascade=orphan, then upgrade again (Redis keeps running)" $kubectl $name -}}
{{- $wanted := .Values.redis.persistence -}}
{{- $live := dict -}}
{{- if not .Values.redis.external.enabled -}}{{- $live = lookup "apps/v1" "StatefulSet" .Release.Namespace $name | default dict -}}{{- end -}}
{{- range dig "spec" "volumeClaimTemplates" list $live -}}
{{- $size := dig "spec" "resources" "requests" "storage" "" . -}}
{{- $class := dig "spec" "storageClassName" "" . -}}
{{- if ne (include "penstock.bytes" $size) (include "penstock.bytes" $wanted.size) -}}
{{- $grow := printf "%s patch pvc data-%s-0 --patch '{\"spec\":{\"resources\":{\"requests\":{\"storage\":\"%s\"}}}}'" $kubectl $name $wanted.size -}}
{{- $faults = append $faults (printf "redis.persistence.size: %s is not valid: expected %s, which the StatefulSet was created with. For a larger volume, if the storage class can grow it, first run: %s && %s" $wanted.size $size $grow $again) -}}
{{- end -}}
{{- if ne $class $wanted.storageClass -}}
{{- $faults = append $faults (printf "redis.persistence.storageClass: %q is not valid: expected %q, which the StatefulSet was created with. For another class, first run: %s; the existing volume keeps its class, only a new volume gets the new one" $wanted.storageClass $class $again) -}}
{{- end -}}
{{- end -}}
{{ toJson $faults }}
{{- end }}

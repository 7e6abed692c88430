{{/* Checks beyond the schema: values against each other, and against the cluster if it can be reached. */}}

{{- define "penstock.validate" -}}
{{- $faults := list -}}
{{- range list "groups" "names" "labels" "queue" "volumes" "redis" "storage" "api" "rewards" "code" -}}
{{- $faults = concat $faults (include (printf "penstock.validate.%s" .) $ | fromJsonArray) -}}
{{- end -}}
{{- /* Every API server has this group, and Helm does not assume it. Without a cluster its APIs are not known. */ -}}
{{- if .Capabilities.APIVersions.Has "apiregistration.k8s.io/v1" -}}
{{- $faults = concat $faults (include "penstock.validate.apis" . | fromJsonArray) -}}
{{- end -}}
{{- /* Kubernetes adds this ConfigMap to every namespace. Without it the namespace is missing, or `lookup` has no cluster. */ -}}
{{- if lookup "v1" "ConfigMap" .Release.Namespace "kube-root-ca.crt" -}}
{{- $faults = concat $faults (include "penstock.validate.owner" . | fromJsonArray) (include "penstock.validate.objects" . | fromJsonArray) -}}
{{- end -}}
{{- with $faults -}}
{{- fail (printf "\n\n%s\n" (join "\n" .)) -}}
{{- end -}}
{{- end }}

{{- define "penstock.cores" -}}
{{- $text := toString . -}}
{{- hasSuffix "m" $text | ternary (divf (trimSuffix "m" $text | float64) 1000) (float64 $text) -}}
{{- end }}

{{- define "penstock.validate.groups" -}}
{{- $faults := list -}}
{{- $store := mul .Values.ray.objectStoreMiB 1048576 -}}
{{- $groups := dict "head" .Values.head -}}
{{- $most := dict "head" 1 -}}
{{- range include "penstock.workers" . | fromJsonArray -}}
{{- $_ := set $groups .at .of -}}
{{- $_ := set $most .key (add (get $most .key | default 0) .of.maxReplicas) -}}
{{- end -}}
{{- range $role, $of := $groups -}}
{{- if gt (int $of.minReplicas) (int (hasKey $of "maxReplicas" | ternary $of.maxReplicas $of.minReplicas)) -}}
{{- $faults = append $faults (printf "%s.minReplicas: %v is not valid: expected at most %s.maxReplicas (%v)" $role $of.minReplicas $role $of.maxReplicas) -}}
{{- end -}}
{{- $pods := get $most $role | default 0 | int -}}
{{- if and $pods (ne $role "learner") (gt (int $of.minAvailable) $pods) -}}
{{- $faults = append $faults (printf "%s.minAvailable: %v is not valid: expected at most %s.maxReplicas (%d), or 0 for no budget" $role $of.minAvailable $role $pods) -}}
{{- end -}}
{{- $shm := include "penstock.bytes" $of.shmSize | int64 -}}
{{- if ge $shm (include "penstock.bytes" $of.memory | int64) -}}
{{- $faults = append $faults (printf "%s.shmSize: %s is not valid: expected less than %s.memory (%s), which includes it" $role $of.shmSize $role $of.memory) -}}
{{- end -}}
{{- if gt (int64 $store) $shm -}}
{{- $faults = append $faults (printf "%s.shmSize: %s is not valid: expected at least ray.objectStoreMiB (%v MiB)" $role $of.shmSize $.Values.ray.objectStoreMiB) -}}
{{- end -}}
{{- end -}}
{{- $all := merge (dict "api" .Values.api "ray.autoscaler" .Values.ray.autoscaler) $groups -}}
{{- if not .Values.redis.external.enabled -}}{{- $_ := set $all "redis" .Values.redis -}}{{- end -}}
{{- if include "penstock.functions.enabled" . -}}{{- $_ := set $all "rewardFunctions" .Values.rewardFunctions -}}{{- end -}}
{{- range $path, $of := $all -}}
{{- with ($of.requests | default dict).memory -}}
{{- if gt (include "penstock.bytes" . | int64) (include "penstock.bytes" $of.memory | int64) -}}
{{- $faults = append $faults (printf "%s.requests.memory: %v is not valid: expected at most %s.memory (%v)" $path . $path $of.memory) -}}
{{- end -}}
{{- end -}}
{{- with ($of.requests | default dict).cpu -}}
{{- if gt (include "penstock.cores" . | float64) (float64 $of.cpus) -}}
{{- $faults = append $faults (printf "%s.requests.cpu: %v is not valid: expected at most %s.cpus (%v)" $path . $path $of.cpus) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- /* Values of an older release say by minAvailable whether the learner may be evicted, and have no disruptions. */ -}}
{{- if and (eq (.Values.learner.disruptions | default "") "block") (eq (toString .Values.learner.minAvailable) "0") -}}
{{- $faults = append $faults "learner.minAvailable: 0 is not valid: expected learner.disruptions: allow in its place, because learner.disruptions: block keeps every pod of the learner" -}}
{{- end -}}
{{- $envs := dict "api.env" .Values.api.env "ray.env" .Values.ray.env -}}
{{- range $role, $of := $groups -}}{{- $_ := set $envs (printf "%s.env" $role) $of.env -}}{{- end -}}
{{- range $path, $env := $envs -}}
{{- range $at, $variable := $env -}}
{{- if regexMatch "^(PENSTOCK_|KUBERAY_|REDIS_|RAY_(AUTH|REDIS|ADDRESS|CLUSTER|CLOUD|NODE_TYPE|external)|HOME$|AWS_(REGION|ENDPOINT_URL|ACCESS_KEY_ID|SECRET_ACCESS_KEY)$)" $variable.name -}}
{{- $faults = append $faults (printf "%s[%d].name: %q is not valid: expected a name that neither the chart nor KubeRay sets" $path $at $variable.name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $name := include "penstock.fullname" . -}}
{{- $parts := "api|cpu|functions|head|learner|redis|rollout|uninstall|verifier" -}}
{{- /* Alerts find pods by name. Names that the chart makes have its own name in them, and so does the shorter one. GitOps tools
       render an installed release as an install too: a name made from the release's is refused for no more than that. */ -}}
{{- $shorter := list .Chart.Name .Values.nameOverride | compact | join "|" -}}
{{- $refused := printf "-(%s)$|(%s).*-(%s)-" $parts $shorter $parts -}}
{{- if .Values.fullnameOverride -}}{{- $refused = printf "-(%s)(-|$)" $parts -}}{{- end -}}
{{- if and .Release.IsInstall (regexMatch $refused $name) -}}
{{- $faults = append $faults (printf "fullnameOverride: %q is not valid: expected a full name (now %q) without the name of a component (%s), because a release of the shorter name would count its pods as its own" .Values.fullnameOverride $name (replace "|" ", " $parts)) -}}
{{- end -}}
{{- if not (regexMatch "^[a-z]([a-z0-9-]*[a-z0-9])?$" $name) -}}
{{- $faults = append $faults (printf "release name: %q is not valid: expected lower-case letters, digits and '-', starting with a letter; otherwise set fullnameOverride" .Release.Name) -}}
{{- end -}}
{{ toJson $faults }}
{{- end }}

{{- define "penstock.validate.volumes" -}}
{{- /* Kubernetes does not check a pod template inside a RayCluster: the error would appear at the first pod, in KubeRay's log. */ -}}
{{- $faults := list -}}
{{- $own := list "autoscaler-tmp" "bounds" "kubernetes-token" "ray-logs" "redis-auth" "redis-ca" "runs" "shm" "tmp" -}}
{{- $names := list -}}
{{- range $at, $volume := .Values.ray.extraVolumes -}}
{{- if or (has $volume.name $own) (has $volume.name $names) -}}
{{- $faults = append $faults (printf "ray.extraVolumes[%d].name: %q is not valid: expected a unique name other than the chart's own (%s)" $at $volume.name (join ", " $own)) -}}
{{- end -}}
{{- $names = append $names $volume.name -}}
{{- end -}}
{{- $taken := list "/dev/shm" "/etc/penstock/bounds" "/etc/penstock/redis-auth" "/etc/penstock/redis-ca" "/tmp" "/tmp/ray" "/var/lib/penstock" -}}
{{- range $at, $mount := .Values.ray.extraVolumeMounts -}}
{{- if not (has $mount.name $names) -}}
{{- $faults = append $faults (printf "ray.extraVolumeMounts[%d].name: %q is not valid: expected a volume of ray.extraVolumes (%s)" $at $mount.name (join ", " $names | default "none")) -}}
{{- end -}}
{{- if has (clean $mount.mountPath) $taken -}}
{{- $faults = append $faults (printf "ray.extraVolumeMounts[%d].mountPath: %q is not valid: expected a unique path other than the chart's own (%s)" $at $mount.mountPath (join ", " $taken)) -}}
{{- end -}}
{{- $taken = append $taken (clean $mount.mountPath) -}}
{{- end -}}
{{ toJson $faults }}
{{- end }}

{{- define "penstock.validate.redis" -}}
{{- $faults := list -}}
{{- $external := .Values.redis.external -}}
{{- if not (or $external.enabled .Values.redis.image.tag .Values.redis.image.digest) -}}
{{- $faults = append $faults "redis.image.tag: \"\" is not valid: expected a tag, or redis.image.digest" -}}
{{- end -}}
{{- $tls := (.Values.redis.tls | default dict).existingSecret -}}
{{- if and $external.enabled $tls -}}
{{- $faults = append $faults (printf "redis.tls.existingSecret: %q is not valid: expected \"\", because redis.external.enabled is true; its TLS is redis.external.tls" $tls) -}}
{{- end -}}
{{- if $external.enabled -}}
{{- if not .Values.redis.existingSecret -}}
{{- $faults = append $faults "redis.existingSecret: \"\" is not valid: expected a Secret with the keys penstock-password and ray-password, because redis.external.enabled is true" -}}
{{- end -}}
{{- if and (empty $external.address) (empty $external.sentinel.addresses) -}}
{{- $faults = append $faults "redis.external.address: \"\" is not valid: expected host:port, or redis.external.sentinel.addresses, because redis.external.enabled is true" -}}
{{- end -}}
{{- if and $external.sentinel.addresses (empty $external.sentinel.service) -}}
{{- $faults = append $faults "redis.external.sentinel.service: \"\" is not valid: expected the name of the service that the Sentinels monitor" -}}
{{- end -}}
{{- if and $external.sentinel.addresses (empty $external.rayAddress) -}}
{{- $faults = append $faults "redis.external.rayAddress: \"\" is not valid: expected host:port of a Service that follows the primary, or of a Sentinel that accepts Ray's user and password, because Sentinels are configured" -}}
{{- end -}}
{{- if and $external.caSecret (not $external.tls) -}}
{{- $faults = append $faults (printf "redis.external.caSecret: %q is not valid: expected \"\", because redis.external.tls is false" $external.caSecret) -}}
{{- end -}}
{{- else -}}
{{- $most := mul .Values.redis.maxMemoryMiB 4 1048576 -}}
{{- if gt $most (mul 3 (include "penstock.bytes" .Values.redis.memory | int64)) -}}
{{- $faults = append $faults (printf "redis.maxMemoryMiB: %v is not valid: expected at most three quarters of redis.memory (%s)" .Values.redis.maxMemoryMiB .Values.redis.memory) -}}
{{- end -}}
{{- /* The append-only file, its rewrite beside it, what is written meanwhile, and the reserve of the start script. */ -}}
{{- if gt $most (include "penstock.bytes" .Values.redis.persistence.size | int64) -}}
{{- $faults = append $faults (printf "redis.persistence.size: %s is not valid: expected at least four times redis.maxMemoryMiB (%dMi), because the append-only file is rewritten beside the old one" .Values.redis.persistence.size (mul .Values.redis.maxMemoryMiB 4)) -}}
{{- end -}}
{{- end -}}
{{ toJson $faults }}
{{- end }}

{{- define "penstock.validate.storage" -}}
{{- $faults := list -}}
{{- $claim := .Values.storage.claim -}}
{{- $sharing := dict "head" .Values.head -}}
{{- $pods := 1 -}}
{{- range include "penstock.workers" . | fromJsonArray -}}
{{- if has .role (include "penstock.storage.roles" $ | fromJsonArray) -}}
{{- $_ := set $sharing .at .of -}}
{{- $pods = add $pods .of.maxReplicas -}}
{{- end -}}
{{- end -}}
{{- if eq .Values.storage.kind "s3" -}}
{{- if not .Values.storage.s3.url -}}
{{- $faults = append $faults "storage.s3.url: \"\" is not valid: expected s3://bucket/prefix, because storage.kind is \"s3\"" -}}
{{- end -}}
{{- else if eq $claim.accessMode "ReadWriteOnce" -}}
{{- if not $claim.sameNode -}}
{{- $faults = append $faults (printf "storage.claim.sameNode: false is not valid: expected true, because up to %d pods write to a ReadWriteOnce volume, which only one node can mount; otherwise set storage.claim.accessMode to \"ReadWriteMany\" (the storage class must support it) or storage.kind to \"s3\"" $pods) -}}
{{- end -}}
{{- $seen := dict -}}
{{- range $role, $of := $sharing -}}
{{- range $key, $value := merge (deepCopy $of.nodeSelector) $.Values.ray.nodeSelector -}}
{{- if and (hasKey $seen $key) (ne (get $seen $key) $value) -}}
{{- $faults = append $faults (printf "%s.nodeSelector: %s = %q is not valid: expected %q as in another group, because head, cpu, rollout and learner share a ReadWriteOnce volume and need one node; otherwise set storage.claim.accessMode to \"ReadWriteMany\" or storage.kind to \"s3\"" $role $key $value (get $seen $key)) -}}
{{- end -}}
{{- $_ := set $seen $key $value -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{ toJson $faults }}
{{- end }}

{{- define "penstock.validate.api" -}}
{{- $faults := list -}}
{{- if .Values.api.ingress.enabled -}}
{{- if not .Values.api.ingress.host -}}
{{- $faults = append $faults "api.ingress.host: \"\" is not valid: expected a host name, because api.ingress.enabled is true" -}}
{{- end -}}
{{- if and .Values.networkPolicy.enabled (empty .Values.networkPolicy.clients) -}}
{{- $faults = append $faults "networkPolicy.clients: [] is not valid: expected the peers of the Ingress controller, which otherwise cannot reach the API" -}}
{{- end -}}
{{- end -}}
{{- with .Values.api.access.oidc -}}
{{- if and .issuer (empty .audience) -}}
{{- $faults = append $faults "api.access.oidc.audience: \"\" is not valid: expected the audience of the issuer's tokens, because api.access.oidc.issuer is set" -}}
{{- end -}}
{{- if and .issuer (empty .groups) -}}
{{- $faults = append $faults "api.access.oidc.groups: {} is not valid: expected the roles of a group, because api.access.oidc.issuer is set" -}}
{{- end -}}
{{- end -}}
{{ toJson $faults }}
{{- end }}

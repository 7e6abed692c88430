{{/* What a schema cannot say: values against each other, and against the cluster where one can be reached. */}}

{{- define "penstock.validate" -}}
{{- $faults := list -}}
{{- range list "groups" "volumes" "redis" "storage" "api" -}}
{{- $faults = concat $faults (include (printf "penstock.validate.%s" .) $ | fromJsonArray) -}}
{{- end -}}
{{- /* Every API server has this group, and Helm does not assume it: without a cluster nothing is known of its APIs. */ -}}
{{- if .Capabilities.APIVersions.Has "apiregistration.k8s.io/v1" -}}
{{- $faults = concat $faults (include "penstock.validate.apis" . | fromJsonArray) -}}
{{- end -}}
{{- /* Kubernetes puts this ConfigMap into every namespace: without it there is none yet, or `lookup` asks no cluster. */ -}}
{{- if lookup "v1" "ConfigMap" .Release.Namespace "kube-root-ca.crt" -}}
{{- $faults = concat $faults (include "penstock.validate.objects" . | fromJsonArray) -}}
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
{{- range $role := list "head" "cpu" "verifier" "rollout" "learner" -}}
{{- $of := get $.Values $role -}}
{{- if gt (int $of.minReplicas) (int ($of.maxReplicas | default $of.minReplicas)) -}}
{{- $faults = append $faults (printf "%s.minReplicas = %v: at most %s.maxReplicas = %v is accepted" $role $of.minReplicas $role $of.maxReplicas) -}}
{{- end -}}
{{- $most := ternary 1 (int $of.maxReplicas) (eq $role "head") -}}
{{- if gt (int $of.minAvailable) $most -}}
{{- $faults = append $faults (printf "%s.minAvailable = %v: at most %s.maxReplicas = %d is accepted; 0 is no budget" $role $of.minAvailable $role $most) -}}
{{- end -}}
{{- $shm := include "penstock.bytes" $of.shmSize | int64 -}}
{{- if ge $shm (include "penstock.bytes" $of.memory | int64) -}}
{{- $faults = append $faults (printf "%s.shmSize = %s: less than %s.memory = %s is accepted, of which it is a part" $role $of.shmSize $role $of.memory) -}}
{{- end -}}
{{- if gt (int64 $store) $shm -}}
{{- $faults = append $faults (printf "%s.shmSize = %s: at least ray.objectStoreMiB = %v MiB is accepted" $role $of.shmSize $.Values.ray.objectStoreMiB) -}}
{{- end -}}
{{- end -}}
{{- $all := dict "api" .Values.api "redis" .Values.redis "ray.autoscaler" .Values.ray.autoscaler "head" .Values.head "cpu" .Values.cpu "verifier" .Values.verifier "rollout" .Values.rollout "learner" .Values.learner -}}
{{- range $path, $of := $all -}}
{{- with $of.requests.memory -}}
{{- if gt (include "penstock.bytes" . | int64) (include "penstock.bytes" $of.memory | int64) -}}
{{- $faults = append $faults (printf "%s.requests.memory = %v: at most %s.memory = %v is accepted" $path . $path $of.memory) -}}
{{- end -}}
{{- end -}}
{{- with $of.requests.cpu -}}
{{- if gt (include "penstock.cores" . | float64) (float64 $of.cpus) -}}
{{- $faults = append $faults (printf "%s.requests.cpu = %v: at most %s.cpus = %v is accepted" $path . $path $of.cpus) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $path, $env := dict "api.env" .Values.api.env "ray.env" .Values.ray.env "head.env" .Values.head.env "cpu.env" .Values.cpu.env "verifier.env" .Values.verifier.env "rollout.env" .Values.rollout.env "learner.env" .Values.learner.env -}}
{{- range $at, $one := $env -}}
{{- if regexMatch "^(PENSTOCK_|KUBERAY_|REDIS_|RAY_(AUTH|REDIS|ADDRESS|CLUSTER|CLOUD|NODE_TYPE|external)|HOME$|AWS_(REGION|ENDPOINT_URL|ACCESS_KEY_ID|SECRET_ACCESS_KEY)$)" $one.name -}}
{{- $faults = append $faults (printf "%s[%d].name = %q: the chart or KubeRay sets it; other names are accepted" $path $at $one.name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $label, $_ := .Values.commonLabels -}}
{{- if regexMatch "^(app[.]kubernetes[.]io|helm[.]sh|ray[.]io|penstock[.]dev)/" $label -}}
{{- $faults = append $faults (printf "commonLabels: %q is the chart's or KubeRay's own; labels with other prefixes are accepted" $label) -}}
{{- end -}}
{{- end -}}
{{- if not (regexMatch "^[a-z]([a-z0-9-]*[a-z0-9])?$" (include "penstock.fullname" .)) -}}
{{- $faults = append $faults (printf "release name = %q: KubeRay accepts small letters, digits and '-', a letter first; or set fullnameOverride" .Release.Name) -}}
{{- end -}}
{{ toJson $faults }}
{{- end }}

{{- define "penstock.validate.volumes" -}}
{{- /* Kubernetes would tell at the first pod only, and KubeRay in its log: a pod inside a RayCluster is not looked at. */ -}}
{{- $faults := list -}}
{{- $own := list "autoscaler-tmp" "bounds" "kubernetes-token" "ray-logs" "redis-auth" "redis-ca" "runs" "shm" "tmp" -}}
{{- $names := list -}}
{{- range $at, $one := .Values.ray.extraVolumes -}}
{{- if or (has $one.name $own) (has $one.name $names) -}}
{{- $faults = append $faults (printf "ray.extraVolumes[%d].name = %q: given twice, or the chart's own; other names than %s are accepted" $at $one.name (join ", " $own)) -}}
{{- end -}}
{{- $names = append $names $one.name -}}
{{- end -}}
{{- $taken := list "/dev/shm" "/etc/penstock/bounds" "/etc/penstock/redis-auth" "/etc/penstock/redis-ca" "/tmp" "/tmp/ray" "/var/lib/penstock" -}}
{{- range $at, $one := .Values.ray.extraVolumeMounts -}}
{{- if not (has $one.name $names) -}}
{{- $faults = append $faults (printf "ray.extraVolumeMounts[%d].name = %q: there is no such volume; those of ray.extraVolumes are accepted: %s" $at $one.name (join ", " $names | default "none")) -}}
{{- end -}}
{{- if has (clean $one.mountPath) $taken -}}
{{- $faults = append $faults (printf "ray.extraVolumeMounts[%d].mountPath = %q: given twice, or the chart's own; other paths than %s are accepted" $at $one.mountPath (join ", " $taken)) -}}
{{- end -}}
{{- $taken = append $taken (clean $one.mountPath) -}}
{{- end -}}
{{ toJson $faults }}
{{- end }}

{{- define "penstock.validate.redis" -}}
{{- $faults := list -}}
{{- $external := .Values.redis.external -}}
{{- if not (or $external.enabled .Values.redis.image.tag .Values.redis.image.digest) -}}
{{- $faults = append $faults "redis.image.tag = \"\": a tag is required, or redis.image.digest" -}}
{{- end -}}
{{- if $external.enabled -}}
{{- if not .Values.redis.existingSecret -}}
{{- $faults = append $faults "redis.existingSecret = \"\": with redis.external.enabled a Secret with the keys penstock-password and ray-password is required" -}}
{{- end -}}
{{- if and (empty $external.address) (empty $external.sentinel.addresses) -}}
{{- $faults = append $faults "redis.external.address = \"\": with redis.external.enabled host:port is required, or redis.external.sentinel.addresses" -}}
{{- end -}}
{{- if and $external.sentinel.addresses (empty $external.sentinel.service) -}}
{{- $faults = append $faults "redis.external.sentinel.service = \"\": the name of the service that the Sentinels watch is required" -}}
{{- end -}}
{{- if and $external.sentinel.addresses (empty $external.rayAddress) -}}
{{- $faults = append $faults "redis.external.rayAddress = \"\": with Sentinels host:port of the primary (a Service that follows it) is required, or of a Sentinel that accepts Ray's user and password" -}}
{{- end -}}
{{- if and $external.caSecret (not $external.tls) -}}
{{- $faults = append $faults (printf "redis.external.caSecret = %q: accepted with redis.external.tls = true only" $external.caSecret) -}}
{{- end -}}
{{- else if gt (mul .Values.redis.maxMemoryMiB 4 1048576) (mul 3 (include "penstock.bytes" .Values.redis.memory | int64)) -}}
{{- $faults = append $faults (printf "redis.maxMemoryMiB = %v: at most three quarters of redis.memory = %s are accepted" .Values.redis.maxMemoryMiB .Values.redis.memory) -}}
{{- end -}}
{{ toJson $faults }}
{{- end }}

{{- define "penstock.validate.storage" -}}
{{- $faults := list -}}
{{- $claim := .Values.storage.claim -}}
{{- $pods := add 1 .Values.cpu.maxReplicas .Values.rollout.maxReplicas .Values.learner.maxReplicas -}}
{{- if eq .Values.storage.kind "s3" -}}
{{- if not .Values.storage.s3.url -}}
{{- $faults = append $faults "storage.s3.url = \"\": with storage.kind = \"s3\" a URL s3://bucket/prefix is required" -}}
{{- end -}}
{{- else if eq $claim.accessMode "ReadWriteOnce" -}}
{{- if not $claim.sameNode -}}
{{- $faults = append $faults (printf "storage.claim.sameNode = false: up to %d pods write to a ReadWriteOnce volume, which only one node can mount; accepted are storage.claim.sameNode = true (they share one node), storage.claim.accessMode = \"ReadWriteMany\" (the storage class must offer it), or storage.kind = \"s3\"" $pods) -}}
{{- end -}}
{{- $seen := dict -}}
{{- range $role := include "penstock.storage.roles" . | fromJsonArray -}}
{{- range $key, $value := merge (deepCopy (get $.Values $role).nodeSelector) $.Values.ray.nodeSelector -}}
{{- if and (hasKey $seen $key) (ne (get $seen $key) $value) -}}
{{- $faults = append $faults (printf "%s.nodeSelector: %s = %q against %q in another group: pods that share a ReadWriteOnce volume need one node; accepted are the same value in head, cpu, rollout and learner, storage.claim.accessMode = \"ReadWriteMany\", or storage.kind = \"s3\"" $role $key $value (get $seen $key)) -}}
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
{{- $faults = append $faults "api.ingress.host = \"\": with api.ingress.enabled a host name is required" -}}
{{- end -}}
{{- if and .Values.networkPolicy.enabled (empty .Values.networkPolicy.clients) -}}
{{- $faults = append $faults "networkPolicy.clients = []: with api.ingress.enabled the peers of the Ingress controller are required, which could not reach the API" -}}
{{- end -}}
{{- end -}}
{{ toJson $faults }}
{{- end }}

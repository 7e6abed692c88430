{{/* Checks of what rewards may reach, and of how programs are isolated. */}}

{{- define "penstock.validate.rewards" -}}
{{- $faults := list -}}
{{- range $at, $host := .Values.verifier.rewardHosts -}}
{{- if not (regexMatch "^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$" $host) -}}
{{- $faults = append $faults (printf "verifier.rewardHosts[%d]: %q is not valid: expected a host's name or IPv4 address in lower case, without scheme, port, path or wildcard, e.g. rewards.internal" $at $host) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.verifier.rewardEgress (empty .Values.verifier.rewardHosts) -}}
{{- $faults = append $faults "verifier.rewardHosts: [] is not valid: expected the hosts that verifier.rewardEgress opens, because no request is sent to others" -}}
{{- end -}}
{{- range $at, $rule := .Values.verifier.rewardEgress -}}
{{- range $number, $peer := $rule.to -}}
{{- with $peer.ipBlock -}}
{{- if and (hasSuffix "/0" .cidr) (not (has "169.254.0.0/16" (.except | default list))) (not (contains ":" .cidr)) -}}
{{- $faults = append $faults (printf "verifier.rewardEgress[%d].to[%d].ipBlock.cidr: %q is not valid: expected `except: [169.254.0.0/16]` beside it, where clouds serve the credentials of nodes" $at $number .cidr) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $functions := .Values.rewardFunctions | default dict -}}
{{- range $at, $variable := $functions.env -}}
{{- if not (regexMatch "^(USER_REWARD_|LANG$|TZ$)" $variable.name) -}}
{{- $faults = append $faults (printf "rewardFunctions.env[%d].name: %q is not valid: expected a name that starts with USER_REWARD_, because functions see no other variables" $at $variable.name) -}}
{{- end -}}
{{- end -}}
{{- range $label, $_ := $functions.podLabels -}}
{{- if regexMatch "^(app[.]kubernetes[.]io|helm[.]sh|penstock[.]dev|([a-z0-9.-]+[.])?(kueue[.]x-k8s[.]io|ray[.]io|volcano[.]sh))/" $label -}}
{{- $faults = append $faults (printf "rewardFunctions.podLabels: %q is not valid: expected a prefix other than those of the chart, of KubeRay and of queues" $label) -}}
{{- end -}}
{{- end -}}
{{ toJson $faults }}
{{- end }}

{{- define "penstock.validate.code" -}}
{{- $faults := list -}}
{{- with .Values.verifierCode -}}
{{- $seccomp := .seccompProfile | default dict -}}
{{- range $field, $profile := dict "seccompProfile" $seccomp "appArmorProfile" (.appArmorProfile | default dict) -}}
{{- if ne (eq ($profile.type | default "") "Localhost") (hasKey $profile "localhostProfile") -}}
{{- $faults = append $faults (printf "verifierCode.%s.localhostProfile: %q is not valid: expected the node's profile with `type: Localhost`, and none with another type" $field ($profile.localhostProfile | default "")) -}}
{{- end -}}
{{- end -}}
{{- if and (eq .isolation "gvisor") (empty .runtimeClassName) -}}
{{- $faults = append $faults "verifierCode.runtimeClassName: \"\" is not valid: expected the RuntimeClass of gVisor, because verifierCode.isolation is \"gvisor\"" -}}
{{- end -}}
{{- if and (eq .isolation "bubblewrap") (has ($seccomp.type | default "RuntimeDefault") (list "RuntimeDefault")) -}}
{{- $faults = append $faults "verifierCode.seccompProfile.type: \"RuntimeDefault\" is not valid: expected Localhost or Unconfined, because verifierCode.isolation is \"bubblewrap\", and the profiles of containerd and CRI-O deny the system calls that make namespaces" -}}
{{- end -}}
{{- end -}}
{{ toJson $faults }}
{{- end }}

{{- define "penstock.validate.rewardSecret" -}}
{{- /* All keys of this Secret become variables of a process that trusts its environment: none may have another name. */ -}}
{{- $faults := list -}}
{{- with .Values.verifier.rewardSecret -}}
{{- range $key, $_ := get (lookup "v1" "Secret" $.Release.Namespace . | default dict) "data" | default dict -}}
{{- if not (regexMatch "^PENSTOCK_REWARD_[A-Z0-9_]{1,64}$" $key) -}}
{{- $faults = append $faults (printf "verifier.rewardSecret: %q is not valid: its key %q: expected only names of PENSTOCK_REWARD_ and A-Z, 0-9, _" $.Values.verifier.rewardSecret $key) -}}
{{- else if eq $key "PENSTOCK_REWARD_HOSTS" -}}
{{- $faults = append $faults (printf "verifier.rewardSecret: %q is not valid: its key %q: expected another name, because the chart sets this variable from verifier.rewardHosts" $.Values.verifier.rewardSecret $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{ toJson $faults }}
{{- end }}

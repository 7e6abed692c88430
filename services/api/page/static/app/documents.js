// Owns nested documents as paths and values. Must not know what they mean.
const isMap = (value) => value !== null && typeof value === "object" && !Array.isArray(value);

/** [["learner.ranks", 1], ...]: every value that is no mapping, or an empty one. */
export const flatten = (document, prefix = "") => Object.entries(document).flatMap(([name, value]) =>
  isMap(value) && Object.keys(value).length ? flatten(value, `${prefix}${name}.`) : [[prefix + name, value]]);

/** A copy of a document with one value set; undefined removes it, and mappings that it leaves empty. */
export function withValue(document, path, value) {
  const [first, ...rest] = path, copy = { ...document };
  if (rest.length) {
    copy[first] = withValue(copy[first] ?? {}, rest, value);
    if (Object.keys(copy[first]).length === 0) delete copy[first];
  } else if (value === undefined) delete copy[first];
  else copy[first] = value;
  return copy;
}

export const valueAt = (document, path) => path.reduce((found, name) => found?.[name], document);

//! Imports flow one way, time comes from one file, system calls from another.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// From the bottom to the top: a file may use only files above it in this list.
const ORDER: &[&str] = &[
    // Words: no I/O, no locks.
    "sync",
    "clock",
    "delivery",
    "origin",
    "stats",
    "profile",
    "timings",
    "error",
    // Rules: pure decisions.
    "rules/persist",
    "rules/shelf",
    "rules/hint",
    "rules/idle",
    "rules/cap",
    "rules/demand",
    "rules/dial_window",
    "rules/learnt",
    "rules/plan",
    "rules/addresses",
    "rules/split",
    // Wire: the only I/O.
    "wire/socket",
    "wire/meter",
    "wire/outgoing",
    "wire/evidence",
    "wire/tls",
    "wire/http1",
    "wire/resolve",
    "wire/dial",
    // Retry: requests, deliveries, errors; not the pool.
    "retry/sf",
    "retry/idempotency",
    "retry/replay",
    "retry/backoff",
    "retry/retry_after",
    "retry/budget",
    "retry/table",
    "retry/policy",
    "retry/layer",
    // Pool: the only locks that outlive a call.
    "pool/builder",
    "pool/desk",
    "pool/lessons",
    "pool/card",
    "pool/state",
    "pool/keeper",
    "pool/lease",
    "pool/body",
    "pool/service",
    "lib",
];

fn sources() -> BTreeMap<String, String> {
    fn walk(directory: &Path, root: &Path, found: &mut BTreeMap<String, String>) {
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                walk(&path, root, found);
                continue;
            }
            let name = path.strip_prefix(root).unwrap().with_extension("");
            let name = name.to_str().unwrap().replace('\\', "/");
            let is_code = path.extension().is_some_and(|extension| extension == "rs");
            let is_test = name.ends_with("tests") || name.ends_with("loom");
            if is_code && !is_test && !name.ends_with("/mod") {
                let text = fs::read_to_string(&path).unwrap();
                let code = text.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
                // Comments may name whatever they like.
                let lines = code
                    .lines()
                    .filter(|line| !line.trim_start().starts_with("//"));
                found.insert(name, lines.collect::<Vec<_>>().join("\n"));
            }
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut found = BTreeMap::new();
    walk(&root, &root, &mut found);
    found
}

/// The files that this code names by a `crate::` path.
fn uses(code: &str) -> Vec<String> {
    let mut used = Vec::new();
    for (at, _) in code.match_indices("crate::") {
        let rest = &code[at + "crate::".len()..];
        let word = |text: &str| -> String {
            text.chars()
                .take_while(|c| c.is_alphanumeric() || *c == '_')
                .collect()
        };
        let first = word(rest);
        let rest = rest[first.len()..].trim_start_matches("::");
        if ["rules", "wire", "retry", "pool"].contains(&first.as_str()) {
            let second = word(rest);
            assert!(
                !second.is_empty(),
                "a grouped import of {first}: write one line for each file"
            );
            used.push(format!("{first}/{second}"));
        } else {
            used.push(first);
        }
    }
    used
}

#[test]
fn imports_flow_one_way() {
    let position = |file: &str| ORDER.iter().position(|name| *name == file);
    for (file, code) in sources() {
        let own =
            position(&file).unwrap_or_else(|| panic!("src/{file}.rs has no place in the order"));
        for used in uses(&code) {
            let Some(place) = position(&used) else {
                panic!("src/{file}.rs names crate::{used}, which is no file");
            };
            assert!(
                place < own,
                "src/{file}.rs uses src/{used}.rs, which is above it"
            );
        }
    }
    for name in ORDER {
        assert!(
            sources().contains_key(*name),
            "src/{name}.rs is gone: take it off the list"
        );
    }
}

#[test]
fn retry_and_pool_do_not_know_each_other() {
    for (file, code) in sources() {
        let used = uses(&code);
        let names = |layer: &str| used.iter().any(|name| name.starts_with(layer));
        if file.starts_with("retry/") {
            assert!(
                !names("pool/") && !names("wire/") && !names("rules/"),
                "src/{file}.rs"
            );
        }
        if file.starts_with("pool/") || file.starts_with("wire/") {
            assert!(!names("retry/"), "src/{file}.rs");
        }
    }
}

#[test]
fn rules_neither_wait_nor_lock_nor_ask_the_time() {
    for (file, code) in sources() {
        if file.starts_with("rules/") {
            for word in ["async ", ".await", "Mutex", "RwLock", "now()", "tokio::"] {
                assert!(!code.contains(word), "src/{file}.rs has `{word}`");
            }
        }
    }
}

#[test]
fn system_calls_are_made_in_one_file() {
    for (file, code) in sources() {
        for word in ["SockRef", "libc::", "nix::"] {
            assert!(
                file == "wire/socket" || !code.contains(word),
                "src/{file}.rs has `{word}`"
            );
        }
    }
}

/// docs/tests.md says which test holds which rule; a test that was renamed or removed must not stay there.
#[test]
fn the_page_of_rules_names_tests_that_exist() {
    fn read_all(directory: &Path, all: &mut String) {
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                read_all(&path, all);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                all.push_str(&fs::read_to_string(&path).unwrap());
            }
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut code = String::new();
    read_all(&root.join("src"), &mut code);
    read_all(&root.join("tests"), &mut code);
    let page = fs::read_to_string(root.join("docs/tests.md")).unwrap();
    let mut named = 0;
    for row in page.lines().filter(|line| line.starts_with("| ")) {
        // Test names are the only words in backquotes with an underscore and no other sign.
        let words = row.split('`').skip(1).step_by(2);
        for name in words.filter(|word| word.contains('_') && !word.contains(['.', ':', '-', '/']))
        {
            if name
                .chars()
                .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
            {
                assert!(
                    code.contains(&format!("fn {name}(")),
                    "docs/tests.md names `{name}`"
                );
                named += 1;
            }
        }
    }
    assert!(named > 100, "the page was not read: {named} names");
}

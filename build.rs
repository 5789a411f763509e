//! Tells the crate which commit it is built from (`EDA_COMMIT`), where that can be known: from git in a clone,
//! from cargo's own note in a package. Elsewhere nothing is set.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let commit = if Path::new(".git").exists() {
        from_git()
    } else {
        from_package()
    };
    if let Some(commit) = commit {
        println!("cargo::rustc-env=EDA_COMMIT={commit}");
    }
}

fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    (output.status.success()).then(|| text.trim().to_owned())
}

/// The commit of this clone, with `-modified` where what is built differs from it.
fn from_git() -> Option<String> {
    const BUILT: [&str; 4] = ["src", "shaders", "Cargo.toml", "build.rs"];
    for path in BUILT {
        println!("cargo::rerun-if-changed={path}");
    }
    // HEAD's log gets a line with each commit and checkout, wherever a work tree's own files are.
    let log = git(&["rev-parse", "--git-path", "logs/HEAD"])?;
    if Path::new(&log).exists() {
        println!("cargo::rerun-if-changed={log}");
    }
    let commit = git(&["rev-parse", "HEAD"]).filter(|c| is_commit(c))?;
    let mut status = vec!["status", "--porcelain", "--"];
    status.extend(BUILT);
    match git(&status)?.is_empty() {
        true => Some(commit),
        false => Some(format!("{commit}-modified")),
    }
}

/// The commit in `.cargo_vcs_info.json`, which cargo puts into packages.
fn from_package() -> Option<String> {
    let info = std::fs::read_to_string(".cargo_vcs_info.json").ok()?;
    let after = info.split("\"sha1\"").nth(1)?;
    let commit = after.split('"').nth(1)?;
    is_commit(commit).then(|| commit.to_owned())
}

fn is_commit(text: &str) -> bool {
    text.len() >= 40 && text.bytes().all(|b| b.is_ascii_hexdigit())
}

//! Anchors: where they are placed, which are kept, what each token sees, and which states a budget evicts.

mod eviction;
mod ledger;
mod placement;
mod plan;
mod policy;
mod retention;
mod rollback;
mod settings;
